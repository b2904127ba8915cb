"""The target drafts for itself: by its first layers, or by all of its weights at fewer bits.

Early exit (LayerSkip, 2404.16710) has no second model and no copy of the weights. Self-quantized drafts (2503.13565,
2502.10424) need no training and no download.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.checks import integer
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle
from foretoken.models.decoder import Decoder
from foretoken.models.early_exit import EarlyExit, Exit
from foretoken.models.formats.checkpoint import resolve
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.options import check_options
from foretoken.models.runners.native.build import kind_bits, packs_groups
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.propose.base import BuildContext, Method, Observation
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.growers import GrowthConfig, refuse_window


@dataclass(frozen=True, slots=True)
class EarlyExitConfig(DraftModelConfig):
    """The keys of a draft model, and the exit layer."""

    # number of layers of the draft; None takes that of the trained exit under "model", or half of the target's
    exit_layer: int | None = None

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        refuse_window(self.draft_window)
        integer("exit_layer", self.exit_layer, 1, optional=True)


def build(config: EarlyExitConfig, build_context: BuildContext) -> DraftModel:
    target = build_context.target
    if not isinstance(target, Decoder):
        raise InvalidRequest(
            "method 'early_exit' shares weights with the target inside our own runtime, which does not compute this "
            "target; use another method"
        )
    exit_head = Exit(config.exit_layer or max(1, target.num_layers // 2))
    if build_context.model is not None:
        exit_head = Exit.load(resolve(build_context.model))
        if config.exit_layer not in (None, exit_head.layers):
            raise InvalidRequest(
                f"exit_layer is {config.exit_layer}, but {build_context.model} was trained for {exit_head.layers}; "
                "leave it out"
            )
    proposer = DraftModel(EarlyExit(target, exit_head), config)
    proposer.name = "early_exit"
    return proposer


METHOD = Method(EarlyExitConfig, build, takes_draft_model=True)


@dataclass(frozen=True, slots=True)
class SelfQuantizedConfig(DraftModelConfig):
    """The keys of a draft model, and the number format of the copy."""

    quantization: str = "int4"  # one of ``options.QUANTIZATIONS``

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        refuse_window(self.draft_window)
        if self.quantization is None:
            raise InvalidRequest("quantization of method 'self_quantized' is 'int4' or 'int8'; leave it out for 'int4'")
        check_options(quantization=self.quantization)


class SharedCacheDraft(DraftModel):
    """Drafts with a model that reads and extends the target's own KV cache: no prefill and no further memory.

    Rows of draft tokens stay behind the committed rows of a slot until the target computes its own in their place. The
    first step of a sequence has no draft, because its slot is not known yet. Beside a target without slots, such as a
    recording, the model has slots of its own.
    """

    def __init__(self, model: Decoder, config: DraftModelConfig) -> None:
        super().__init__(model, config)
        self._slots: dict[int, int] = {}  # the target's, by sequence

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            self._slots[context.id] = observation.scores.slot
        super().observe(contexts, observations)

    @property
    def kv_bytes_per_token(self) -> int:
        return 0

    def enable_prefix_cache(self, max_bytes: int) -> None:
        """Does nothing: the target caches prefixes."""

    def forget(self, context: Context) -> None:
        self._slots.pop(context.id, None)
        super().forget(context)

    def _shape(self, context: Context, budget: int, drawn: bool) -> GrowthConfig | None:
        return super()._shape(context, budget, drawn) if context.id in self._slots else None

    def _reads(self, context: Context) -> bool:
        return True

    def _handle(self, context: Context) -> Handle:
        """Returns the target's rows of the sequence; only the newest token has none."""
        if (slot := self._slots[context.id]) < 0:
            return super()._handle(context)
        return Handle(slot, context.tokens, len(context.tokens) - 1)


def build_quantized(config: SelfQuantizedConfig, build_context: BuildContext) -> DraftModel:
    target, path = build_context.target, build_context.path
    if build_context.model is not None:
        raise InvalidRequest("method 'self_quantized' drafts with the target's own weights; leave 'model' out")
    runner = target.runner if isinstance(target, Decoder) else None
    if path is None or not isinstance(runner, NativeRunner) or not packs_groups(target.dtype):
        raise InvalidRequest(
            "method 'self_quantized' needs a target from a file on the compiled runtime: elsewhere quantized weights "
            "are no faster; use another method"
        )
    scheme = Quantizer.of(config.quantization)
    assert scheme is not None
    if (bits := min(map(kind_bits, runner.kinds))) <= scheme.bits:
        raise InvalidRequest(
            f"method 'self_quantized' needs a target of more than the {scheme.bits} bits of {config.quantization!r}, "
            f"and {path.name} has matrices of {bits}; use another method"
        )
    copy = build_context.load(path, quantization=config.quantization, weight_format="raw")
    copy.share(target)  # the encoder, if there is one
    assert isinstance(copy, Decoder) and isinstance(copy.runner, NativeRunner)
    shares = not target.takes_source and copy.runner.attach_to(runner)
    proposer = SharedCacheDraft(copy, config) if shares else DraftModel(copy, config)
    proposer.name = "self_quantized"
    return proposer


SELF_QUANTIZED = Method(SelfQuantizedConfig, build_quantized)
