"""Heads for a widened target that compute the same as the source's heads on the source, up to rounding.

Notation of ``widen.units``, row vectors: the narrow residual stream x is x Q in the wide target, whose last norm has
weight 1. For r = x / rms(x), the narrow target's output is r w, with w the weight of its last norm, and the wide one's
is s r Q, with s = sqrt(h'/h). So W diag(w) Q / s applied to the wide output equals W applied to the narrow one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken import zoo
from foretoken.core.artifacts import HEADS_FOLDER, PROVENANCE, Destination, heads_method, heads_of
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.files import write_json
from foretoken.core.schema import read_object
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.reader import TensorReader
from foretoken.models.formats.shards import weights_sha256
from foretoken.models.heads.block import BlockHead, read_block
from foretoken.models.heads.dialects import Written, write_block, write_eagle
from foretoken.models.heads.eagle import MASK, EagleHead, default_taps, read_eagle
from foretoken.models.heads.medusa import (
    BlockwiseHeads,
    Feedforward,
    MedusaHeads,
    read_blockwise,
    read_medusa,
    write_blockwise,
    write_medusa,
)
from foretoken.train.widen.units import rotation


@dataclass(frozen=True)
class Widening:
    """The widening of a target."""

    q: Tensor  # Q, [h, h']
    norm: Tensor  # weight of the source's last norm, [h]
    embedding: Tensor  # the source's embeddings, [V, h]
    vocabulary: Tensor  # the source's vocabulary head, [V, h]
    layers: tuple[int, ...]  # positions of the source's layers among the wide ones
    wide_layers: int

    @property
    def factor(self) -> float:
        """s, see the module."""
        return math.sqrt(self.q.shape[1] / self.q.shape[0])

    @staticmethod
    def of(source: Path, wide: Path) -> "Widening":
        """Returns the widening of ``source`` to ``wide``. Raises InvalidRequest if ``wide`` is of another source."""
        try:
            made = read_object(wide / PROVENANCE)
            digest, shape = made["source_sha256"], made["shape"]
        except (OSError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"{wide} does not say how it was widened ({PROVENANCE}: {error}); make it with foretoken widen"
            ) from error
        if digest != weights_sha256(source):
            raise InvalidRequest(
                f"{wide} was widened from another model than {source}; its heads cannot be carried over"
            )
        reader = TensorReader(open_weights(source), torch.float64)
        embedding = reader.get("model.embed_tokens.weight")
        tied = "lm_head.weight" not in reader.weights
        return Widening(
            q=rotation(embedding.shape[1], shape["hidden_size"], made["seed"]),
            norm=reader.get("model.norm.weight").double(),
            embedding=embedding,
            vocabulary=embedding if tied else reader.get("lm_head.weight"),
            layers=tuple(made["layers"]),
            wide_layers=shape["num_hidden_layers"],
        )

    def position(self, tap: int) -> int:
        """Returns the wide target's index of the narrow one's ``hidden_states[tap]``."""
        return self.layers[tap] if tap < len(self.layers) else self.wide_layers

    def stream(self, weight: Tensor, tap: int) -> Tensor:
        """Widens a matrix [n, h] that reads ``hidden_states[tap]`` to [n, h']."""
        return weight.double() @ self.q if tap < len(self.layers) else self.normed(weight)

    def state(self, state: Tensor, tap: int) -> Tensor:
        """Widens a vector [h] that stands for ``hidden_states[tap]`` to [h']."""
        if tap < len(self.layers):
            return state.double() @ self.q
        return self.factor * (state.double() / self.norm) @ self.q

    def normed(self, weight: Tensor) -> Tensor:
        """Widens a matrix [n, h] that reads the last norm's output to [n, h']."""
        return (weight.double() * self.norm) @ self.q / self.factor


def widen_eagle(head: EagleHead, w: Widening) -> Written:
    """Widens an EAGLE-3 head: fc reads every tap through Q. The layer stays, with a separate embedding."""
    if head.version != 3 or head.norm_before_fc or head.fc_norm or not head.exact:
        raise InvalidRequest(
            "only EAGLE-3 heads whose fc reads hidden states as they are, at known layers, are widened"
        )
    taps = head.taps or default_taps(len(w.layers))
    tensors = _with_ends(_widened_fc(head.tensors, taps, w), w, head.vocab, head.hidden, ("embed_tokens",))
    if (mask := tensors.get(MASK)) is not None:
        chunks = zip(mask.chunk(len(taps)), taps, strict=True)
        tensors[MASK] = torch.cat([w.state(chunk, tap) for chunk, tap in chunks]).to(mask.dtype)
    positions = tuple(w.position(tap) for tap in taps)
    wide = replace(head, tensors=tensors, target_hidden=w.q.shape[1], taps=positions)
    return write_eagle(wide, "sglang" if head.layers == 1 else "vllm", positions)


def widen_block(head: BlockHead, w: Widening) -> Written:
    """Widens a DFlash, JetSpec or DSpark head: fc reads every tap through Q. The layers stay, and get separate ends."""
    ends = ("embed_tokens", "lm_head")
    tensors = _with_ends(_widened_fc(head.tensors, head.taps, w), w, head.vocab, head.hidden, ends)
    taps = tuple(w.position(tap) for tap in head.taps)
    return write_block(replace(head, tensors=tensors, target_hidden=w.q.shape[1], taps=taps), "original")


def _widened_fc(tensors: Mapping[str, Tensor], taps: Sequence[int], w: Widening) -> dict[str, Tensor]:
    """Returns the tensors with an fc that reads the taps of the wide target."""
    fc = tensors["fc.weight"]
    blocks = [w.stream(block, tap) for block, tap in zip(fc.chunk(len(taps), dim=1), taps, strict=True)]
    return {**tensors, "fc.weight": torch.cat(blocks, dim=1).to(fc.dtype)}


def _with_ends(
    tensors: dict[str, Tensor], w: Widening, vocab: int, hidden: int, ends: Sequence[str]
) -> dict[str, Tensor]:
    """Returns the tensors with the source's embedding and vocabulary head in the place of missing ones.

    Raises InvalidRequest if they have another size.
    """
    given = {"embed_tokens": w.embedding, "lm_head": w.vocabulary}
    for name in ends:
        if f"{name}.weight" in tensors:
            continue
        if tuple(given[name].shape) != (vocab, hidden):
            raise InvalidRequest(f"the head has no {name} and cannot share its target's, whose size is different")
        tensors[f"{name}.weight"] = given[name].to(tensors["fc.weight"].dtype, copy=True)
    return tensors


def widen_medusa(heads: MedusaHeads, w: Widening) -> Written:
    """Widens Medusa heads: the output of SiLU goes to the first h entries, the target's output is in Q's rows.

    A layer or vocabulary head that reads the sum must read both: R [Q^T, I_h] = [W diag(w)/s, W] has a solution,
    because Q's rows and the first h axes are linearly independent.
    """
    narrow, wide = w.q.shape
    if 2 * narrow > wide:
        raise InvalidRequest(f"Medusa heads are widened to at least twice their width of {narrow}, not to {wide}")
    axes = torch.eye(wide, narrow, dtype=torch.float64)
    inverse = torch.linalg.pinv(torch.cat([w.q.T, axes], dim=1))  # [2h, h']

    def both(weight: Tensor) -> Tensor:
        inputs = torch.cat([weight.double() * w.norm / w.factor, weight.double()], dim=1)
        return (inputs @ inverse).to(weight.dtype)

    def layer(weight: Tensor, bias: Tensor | None, first: bool) -> tuple[Tensor, Tensor | None]:
        rows = weight.new_zeros(wide, wide)
        rows[:narrow] = w.normed(weight).to(weight.dtype) if first else both(weight)
        return rows, None if bias is None else torch.cat([bias, bias.new_zeros(wide - narrow)])

    blocks = tuple(tuple(layer(*weights, first=j == 0) for j, weights in enumerate(block)) for block in heads.blocks)
    matrices = heads.vocabulary or (w.vocabulary.to(heads.blocks[0][0][0].dtype),)
    vocabulary = tuple(both(matrix) for matrix in matrices)
    return write_medusa(replace(heads, hidden=wide, blocks=blocks, vocabulary=vocabulary), "vllm")


def widen_blockwise(heads: BlockwiseHeads, w: Widening) -> Written:
    """Widens blockwise heads: up reads through the norm, down writes a / w through Q, read as a by the vocabulary."""

    def writes(weight: Tensor) -> Tensor:
        wide = w.factor * w.q.T @ (weight.double() / w.norm.view(-1, *[1] * (weight.ndim - 1)))
        return wide.to(weight.dtype)

    wide = tuple(
        Feedforward(w.normed(h.up).to(h.up.dtype), h.up_bias, writes(h.down), writes(h.down_bias)) for h in heads.heads
    )
    return write_blockwise(BlockwiseHeads(w.q.shape[1], wide))


def widen_head(head: Path, source: Path, wide: Path) -> Path:
    """Writes heads for ``wide``, made from heads for its ``source``, into its ``heads`` folder, once.

    Raises:
        InvalidRequest: The heads cannot be widened.
        ModelLoadError: The heads cannot be read.
        TrainingError: The disk has too little space.
    """
    digest = weights_sha256(head)
    method = heads_method(read_object(head / "config.json"))
    role = method if method in _KINDS else "eagle3"
    out = wide / HEADS_FOLDER / role
    if _digest(out) == digest:
        return out
    config, tensors = _widened(role, head, Widening.of(source, wide))
    with Destination.checked(out, heads_of(role), (head, source), force=True).folder() as folder:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        write_json(folder / "config.json", config)
        write_json(folder / PROVENANCE, {"widened_from": head.name, "source_sha256": digest})
    return out


def scaled_head(role: str, wide: Path) -> Path:
    """Returns the bundled heads of a role for ``wide``, the widened bundled target. They are made once."""
    return widen_head(zoo.path(role), zoo.path("target"), wide)


def scale_bundled(wide: Path) -> list[Path]:
    """Returns all bundled heads for ``wide``, the widened bundled target."""
    bundled = {model.role for model in zoo.list_models()}
    return [scaled_head(role, wide) for role in _KINDS if role in bundled]


_KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Widening], Written]]] = {
    "eagle3": (read_eagle, widen_eagle),
    "dflash": (read_block, widen_block),
    "jetspec": (read_block, widen_block),
    "dspark": (read_block, widen_block),
    "medusa": (read_medusa, widen_medusa),
    "blockwise": (read_blockwise, widen_blockwise),
}
"""By method, the functions that read its heads and widen them."""


def _widened(role: str, head: Path, w: Widening) -> Written:
    read, widen = _KINDS[role]
    heads = read(head)
    hidden = heads.target_hidden if hasattr(heads, "target_hidden") else heads.hidden
    if hidden != w.q.shape[0]:
        raise InvalidRequest(
            f"the heads in {head} were made for a target with hidden size {hidden}, not for one with {w.q.shape[0]}"
        )
    return widen(heads, w)


def _digest(out: Path) -> str | None:
    if not (out / PROVENANCE).exists():
        return None
    try:
        made: str | None = read_object(out / PROVENANCE).get("source_sha256")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {out / PROVENANCE}: {error}; delete {out}") from error
    return made
