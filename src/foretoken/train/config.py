"""Settings of training runs, without torch, because the command line is generated from them (``cli.grouped``).

Each dataclass is a group of options. A field is the option of its name unless its metadata has another one; None means
no option. The ``Args`` of a docstring are the help of the options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from foretoken.core.checks import integer, number
from foretoken.core.errors import InvalidRequest
from foretoken.core.settings import named


@dataclass(frozen=True)
class RunOptions:
    """Output and device of a training run.

    Args:
        out: Folder to write.
        device: auto, cpu or cuda.
        resume: Continue an interrupted run.
        force: Replace an earlier OUT of the same kind, and restart an interrupted run.
    """

    out: Path
    device: str = "auto"
    resume: bool = False
    force: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run, learning rate and batches.

    Args:
        steps: Length in optimizer steps.
        minutes: Length in minutes, instead of --steps. The schedule then follows the clock.
        batch: Windows per step and process.
        window: Tokens per window.
        learning_rate: Highest learning rate.
        weight_decay: Weight decay of matrices.
        warmup: First fraction of the run, in which the learning rate rises.
        decay: Last fraction of the run, in which the learning rate falls to zero.
        seed: Seed of initialization and batches.
        evaluate_every_seconds: Seconds between evaluations.
        compile: Use torch.compile; by default if a C++ compiler is found.
        patience: Evaluations without improvement after which the run ends with the best weights.
        dropout: Fraction of the layers' outputs that is dropped in training; only some models support it.
        recorded: Record steps as a CUDA graph, of models whose operations allow it.
    """

    steps: int = 2000
    minutes: float | None = None
    batch: int = 10
    window: int = 768
    learning_rate: float = 3e-3
    weight_decay: float = named(None, 0.1)
    warmup: float = named(None, 0.02)
    decay: float = named(None, 0.6)
    seed: int = 0
    evaluate_every_seconds: float = named(None, 300.0)
    compile: bool | None = None
    patience: int | None = None
    dropout: float = 0.0
    recorded: bool = named(None, False)

    def __post_init__(self) -> None:
        for name, minimum in (("steps", 1), ("batch", 1), ("window", 2)):
            if getattr(self, name) < minimum:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.patience is not None and self.patience < 1:
            raise InvalidRequest(f"patience is {self.patience}; it must be at least 1 evaluation")
        if not 0 <= self.dropout < 1:
            raise InvalidRequest(f"dropout is {self.dropout}; it must be a fraction, at least 0 and below 1")
        for name in ("learning_rate", "warmup", "decay", "minutes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"{name} is {value}; it must be a positive number")

    def arguments(self) -> str:
        """Returns the command line options that give these settings."""
        length = f"--steps {self.steps}" if self.minutes is None else f"--minutes {self.minutes:g}"
        dropout = f" --dropout {self.dropout:g}" if self.dropout else ""
        patience = f" --patience {self.patience}" if self.patience is not None else ""
        return (
            f"{length} --batch {self.batch} --window {self.window} --learning-rate {self.learning_rate:g} "
            f"--seed {self.seed}{dropout}{patience}"
        )


TARGET_CONFIG = TrainConfig(minutes=120.0, batch=14)
HYBRID_CONFIG = TrainConfig(minutes=120.0, batch=20, dropout=0.1)
DRAFT_CONFIG = TrainConfig(minutes=20.0, batch=8, window=512, learning_rate=4e-3, weight_decay=0.05)
HEAD_CONFIG = TrainConfig(minutes=20.0, batch=4, window=512, learning_rate=2e-3, weight_decay=0.05)
ACCEPTANCE_CONFIG = TrainConfig(steps=1500, batch=512, window=256, learning_rate=3e-3, weight_decay=0.05, compile=False)
SEQ2SEQ_CONFIG = TrainConfig(minutes=34.0, batch=16, window=176, decay=0.5)
SEQ2SEQ_DRAFT_CONFIG = TrainConfig(minutes=20.0, batch=16, window=176, learning_rate=4e-3, weight_decay=0.05)


@dataclass(frozen=True)
class DistillConfig:
    """Target distributions and loss of a distilled draft.

    Args:
        top: Most likely tokens kept of the target's distribution. The others share one bucket.
        acceptance_share: Last fraction of the run, which changes from KL to the acceptance loss.
        teacher_share: Largest fraction of --minutes for sampling text and computing the target's distributions.
        disk_gigabytes: Disk space for the target's distributions during the run.
        generated_share: Fraction of the windows that the target samples (2310.08461, on-policy data).
    """

    top: int = 64
    acceptance_share: float = 0.3
    teacher_share: float = named(None, 0.3)
    disk_gigabytes: float = 2.0
    generated_share: float = 0.0

    def __post_init__(self) -> None:
        integer("top", self.top, 1)
        number("generated_share", self.generated_share, 0, 1)
        number("acceptance_share", self.acceptance_share, 0, 1)


@dataclass(frozen=True)
class HeadConfig:
    """Training text and loss of a head.

    Args:
        windows: Maximum number of training windows.
        generated_share: Fraction of the windows that the target samples, when it writes.
        writing_share: Largest fraction of --minutes in which the target may write.
        disk_gigabytes: Disk space for hidden states; by default 12, on a GPU 0. Other windows are recomputed.
        held_out: Held-out windows at each of two temperatures.
        acceptance_share: Last fraction of the run, which changes from cross-entropy to the acceptance loss.
        discount: Factor of the loss per predicted token.
    """

    windows: int = 6400
    generated_share: float = 0.2
    writing_share: float = 0.2
    disk_gigabytes: float | None = None
    held_out: int = 32
    acceptance_share: float = 0.3
    discount: float = 0.8

    def __post_init__(self) -> None:
        integer("windows", self.windows, 1)
        integer("held_out", self.held_out, 1)
        for name in ("generated_share", "writing_share", "acceptance_share"):
            number(name, getattr(self, name), 0, 1)
        number("discount", self.discount, 1e-6, 1)
        number("disk_gigabytes", self.disk_gigabytes, 0, optional=True)


@dataclass(frozen=True)
class AcceptanceConfig:
    """Size and training data of an acceptance head.

    Args:
        intermediate: Hidden units of the head.
        windows: Maximum number of training windows.
        generated_share: Fraction of the windows that the target samples. The others are cut from the corpus.
        held_out: Held-out windows at each of two temperatures.
    """

    intermediate: int = 64
    windows: int = 256
    generated_share: float = 0.75
    held_out: int = 16

    def __post_init__(self) -> None:
        for name in ("intermediate", "windows", "held_out"):
            integer(name, getattr(self, name), 1)
        number("generated_share", self.generated_share, 0, 1)


@dataclass(frozen=True)
class HeadSettings:
    """Size of a head and its own training settings."""

    learning_rate: ClassVar[float] = HEAD_CONFIG.learning_rate

    def _check(self, *names: str) -> None:
        """Checks that fields, and the numbers of heads if they are given, are positive integers."""
        for name in (*names, *(name for name in ("heads", "kv_heads") if getattr(self, name, None) is not None)):
            integer(name, getattr(self, name), 1)


@dataclass(frozen=True)
class FusedConfig(HeadSettings):
    """Size of a head on three fused hidden states.

    Args:
        taps: Three layers whose inputs are fused, like 2,4,5.
        intermediate: Units of the MLPs.
        heads: Attention heads; by default the target's.
        kv_heads: Key-value heads; by default the target's.
        vocabulary: Size of the draft vocabulary: the target's most frequent tokens.
    """

    taps: tuple[int, ...] | None = None
    intermediate: int = 448
    heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int = 3072

    def __post_init__(self) -> None:
        self._check("intermediate", "vocabulary")
        if self.taps is not None and len(self.taps) != 3:
            raise InvalidRequest(f"{len(self.taps)} taps; EAGLE-3 fuses three hidden states, low, middle and high")

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are fused, by default [2, n // 2, n - 3]."""
        taps = self.taps or (min(2, layers - 1), layers // 2, max(layers - 3, 1))
        if not all(0 < tap < layers for tap in taps):
            raise InvalidRequest(f"taps {list(taps)} for a target of {layers} layers; expected 1 to {layers - 1}")
        return taps


@dataclass(frozen=True)
class Eagle3Config(FusedConfig):
    """An EAGLE-3 head.

    Args:
        depths: Unrolled steps in training.
        single_share: First fraction of the run, in which only one step is unrolled. It costs a third.
    """

    depths: int = 4
    single_share: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("depths")
        number("single_share", self.single_share, 0, 1)


@dataclass(frozen=True)
class PEagleConfig(FusedConfig):
    """A P-EAGLE head.

    Args:
        layers: Decoder layers. Predicting all positions at once needs more than EAGLE-3's one.
        depths: Predicted positions.
        retention: Fraction of a depth's positions at which the next depth is trained too.
        mask_token: Token id of positions that are not drafted yet; by default the target's rarest token.
    """

    layers: int = 3
    depths: int = 8
    retention: float = 0.7
    mask_token: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("layers", "depths")
        number("retention", self.retention, 1e-6, 1)
        integer("mask_token", self.mask_token, 0, optional=True)


@dataclass(frozen=True)
class MtpTrainConfig(HeadSettings):
    """A multi-token-prediction layer.

    Args:
        intermediate: Units of the MLP.
        heads: Attention heads; by default the target's.
        kv_heads: Key-value heads; by default the target's.
        depths: Unrolled steps in training.
        single_share: First fraction of the run, in which only one step is unrolled. It costs a third.
    """

    intermediate: int = 768
    heads: int | None = None
    kv_heads: int | None = None
    depths: int = 4
    single_share: float = 0.5

    def __post_init__(self) -> None:
        self._check("intermediate", "depths")
        number("single_share", self.single_share, 0, 1)


@dataclass(frozen=True)
class MedusaTrainConfig(HeadSettings):
    """Medusa heads.

    Args:
        heads: Tokens predicted ahead, by one head each.
        layers: Residual layers of each head.
    """

    learning_rate: ClassVar[float] = 6e-3
    heads: int = 4
    layers: int = 1

    def __post_init__(self) -> None:
        self._check("heads", "layers")


@dataclass(frozen=True)
class BlockwiseTrainConfig(HeadSettings):
    """Blockwise parallel heads.

    Args:
        heads: Tokens predicted ahead, by one head each.
        intermediate: Hidden units of each head.
    """

    learning_rate: ClassVar[float] = 6e-3
    heads: int = 4
    intermediate: int = 192

    def __post_init__(self) -> None:
        self._check("heads", "intermediate")


@dataclass(frozen=True)
class EarlyExitTrainConfig(HeadSettings):
    """An early exit.

    Args:
        exit_layer: Layer of the target before which it exits; by default after a quarter of its layers.
    """

    exit_layer: int | None = None

    def tapped(self, layers: int) -> int:
        """Returns the layer whose input is read."""
        layer = max(1, layers // 4) if self.exit_layer is None else self.exit_layer
        if not 0 < layer < layers:
            raise InvalidRequest(f"exit_layer {layer} for a target of {layers} layers; expected 1 to {layers - 1}")
        return layer


@dataclass(frozen=True)
class DFlashTrainConfig(HeadSettings):
    """A DFlash head.

    Args:
        block: Rows of a block. A DFlash head predicts one token less, a DSpark head as many.
        layers: Decoder layers.
        taps: Layers whose inputs are read, like 1,3,5,7; by default five, spread over the target.
        intermediate: Units of the MLPs; by default the target's.
        heads: Attention heads; by default the target's.
        kv_heads: Key-value heads; by default the target's.
        mask_token: Token id of the rows after the newest token; by default the target's rarest token.
        anchors: Blocks per window and training step, at random positions.
    """

    block: int = 8
    layers: int = 3
    taps: tuple[int, ...] | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mask_token: int | None = None
    anchors: int = 96

    def __post_init__(self) -> None:
        integer("block", self.block, 2)
        self._check("layers", "anchors")
        integer("intermediate", self.intermediate, 1, optional=True)
        integer("mask_token", self.mask_token, 0, optional=True)

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are read; ``layers`` stands for the target's normed output."""
        spread = {1 + round(i * (layers - 2) / 4) for i in range(5)}
        taps = self.taps or tuple(sorted(tap for tap in spread if tap > 0)) or (layers,)
        if not all(0 < tap <= layers for tap in taps):
            raise InvalidRequest(f"taps {list(taps)} for a target of {layers} layers; expected 1 to {layers}")
        return taps


@dataclass(frozen=True)
class DSparkTrainConfig(DFlashTrainConfig):
    """A DSpark head, see also ``DFlashTrainConfig``.

    Args:
        markov_rank: Rank of the Markov head.
        gated: Gate the Markov head by each row's hidden state.
    """

    markov_rank: int = 128
    gated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("markov_rank")


HEAD_SETTINGS: dict[str, type[HeadSettings]] = {
    "eagle3": Eagle3Config,
    "peagle": PEagleConfig,
    "mtp": MtpTrainConfig,
    "medusa": MedusaTrainConfig,
    "blockwise": BlockwiseTrainConfig,
    "early-exit": EarlyExitTrainConfig,
    "dflash": DFlashTrainConfig,
    "dspark": DSparkTrainConfig,
}
"""Settings of each kind of head."""


def method_of(role: str) -> str:
    """Returns the method that drafts with a kind of heads."""
    return {"peagle": "eagle3", "early-exit": "early_exit"}.get(role, role)
