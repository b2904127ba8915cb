"""The target's distribution from its checkpoint, computed here."""

from __future__ import annotations

from pathlib import Path

from foretoken.core.draft import Draft
from foretoken.models.loading import load_model
from foretoken.probe.answers import Failed, ServerAnswer, TokenPlace

TOP = 50  # likeliest tokens that are cells of their own


class CheckpointReference:
    """A model whose forward pass tells what a server should have sampled from.

    Args:
        model: A folder, GGUF file or hub name.
        dtype: Type to compute in, such as that of the server.

    Raises:
        ModelLoadError: It cannot be loaded.
    """

    def __init__(self, model: str | Path, dtype: str = "auto") -> None:
        self.name = str(model)
        self._model = load_model(model, dtype)

    def places(self, text: ServerAnswer) -> tuple[TokenPlace, ...] | Failed:
        """Returns the places of a text, named by token ids."""
        if not text.ids or not text.prompt_ids:
            return Failed("the server does not tell token ids, which a checkpoint needs")
        highest = max(*text.ids, *text.prompt_ids)
        handle = None
        try:
            handle = self._model.open(list(text.prompt_ids))
            logits = self._model.score([handle], [Draft.chain(list(text.ids[:-1]))])[0].logits
        except (IndexError, ValueError, RuntimeError) as error:
            return Failed(f"the checkpoint cannot read tokens up to {highest}: {error}")
        finally:
            if handle is not None:
                self._model.close(handle)
        if highest >= logits.shape[-1]:
            return Failed(f"token {highest} is not in the checkpoint's vocabulary of {logits.shape[-1]}")
        logs = logits.double().log_softmax(-1)
        values, ids = logs.topk(min(TOP, logs.shape[-1]))
        rows = zip(text.ids, logs, values.tolist(), ids.tolist(), strict=True)
        return tuple(
            TokenPlace(str(token), float(row[token]), tuple((str(i), float(v)) for i, v in zip(best, top, strict=True)))
            for token, row, top, best in rows
        )
