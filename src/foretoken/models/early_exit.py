"""The first layers of a model and its head as a draft model (LayerSkip, 2404.16710); all weights are shared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.runners.base import Pass
from foretoken.models.runners.linear import product
from foretoken.models.runners.pass_plan import PassPlan

MODEL_TYPE = "foretoken_early_exit"


@dataclass(frozen=True, slots=True)
class Exit:
    """The last layer that is computed, and the transformation before the head."""

    layers: int  # number of layers that are computed
    norm: Tensor | None = None  # weight [H] of the norm before the head; None for the model's
    # matrix [H, H]; logits = head(n + adapter n) for the normed state n; None for head(n)
    adapter: Tensor | None = None

    @staticmethod
    def load(path: Path) -> "Exit":
        """Reads a trained exit: ``exit_layer`` of config.json, ``norm.weight`` and ``adapter.weight``.

        Raises ModelLoadError if the checkpoint is not an exit's, or is damaged.
        """
        config = load_config(path)
        layers, hidden = config.get("exit_layer"), config.get("hidden_size")
        if config.get("model_type") != MODEL_TYPE or not isinstance(layers, int) or not isinstance(hidden, int):
            raise ModelLoadError(
                f"{path} is no trained exit: config.json must have model_type {MODEL_TYPE!r}, exit_layer and "
                "hidden_size; make one with foretoken train early-exit"
            )
        weights, tensors = open_weights(path), {}
        for name, shape in (("norm.weight", (hidden,)), ("adapter.weight", (hidden, hidden))):
            if name not in weights or tuple(weights[name].shape) != shape:
                raise ModelLoadError(f"{path} lacks a tensor {name!r} of shape {shape}; is the checkpoint complete?")
            tensors[name] = weights[name]
        return Exit(layers, tensors["norm.weight"], tensors["adapter.weight"])


class EarlyExit(Decoder):
    """The first layers of ``model``: shares its weights, with a separate KV cache.

    Raises InvalidRequest if the exit is not inside the model, or was trained for another hidden size.
    """

    def __init__(self, model: Decoder, exit_: Exit) -> None:
        a, hidden = model.architecture, (model.hidden_size,)
        if not 1 <= exit_.layers < a.layers:
            raise InvalidRequest(
                f"exit_layer must be from 1 to {a.layers - 1}, since the target has {a.layers} layers; "
                f"got {exit_.layers}"
            )
        if exit_.norm is not None and exit_.norm.shape != hidden:
            raise InvalidRequest(
                f"the exit was trained for a hidden size of {exit_.norm.shape[0]} and the target's is {hidden[0]}; "
                "train one for this target"
            )
        self.take_sizes(model)
        self.architecture, self.num_layers = a.first(exit_.layers), exit_.layers
        self.runner = model.runner.first(self.architecture, None if exit_.norm is None else exit_.norm.float())
        self.batch_invariant = self.runner.batch_invariant
        self.adapts_levels = exit_.adapter is not None or self.runner.adapts_levels
        self._adapter = None
        if exit_.adapter is not None:
            self._adapter = product(exit_.adapter.to(self.device, self.dtype))

    @property
    def drafts_chains(self) -> bool:
        return self._adapter is None and super().drafts_chains

    def _run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        if self._adapter is None or not logits:
            return super()._run(plan, taps, logits)
        last = self.num_layers
        tapped = super()._run(plan, [*{*taps, last}], logits=False).taps
        normed = tapped[last][plan.output_rows].to(self.dtype)
        scores = self.runner.unembed(normed + self._adapter(normed))
        return Pass(scores, {number: tapped[number] for number in taps})
