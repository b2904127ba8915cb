"""Settings of training runs, without torch, because the command line is generated from them (``cli.grouped``).

Each dataclass is a group of options. A field is the option of its name unless its metadata has another one; None means
no option. The ``Args`` of a docstring are the help of the options.
"""

from dataclasses import dataclass, field, fields, replace
from inspect import formatannotation
from pathlib import Path
from typing import Any

from foretoken.core.checks import integer, named, number
from foretoken.core.errors import InvalidRequest

_POSITIVE = 1e-12


def limited(default: float | None, low: float, high: float | None = None) -> Any:
    """Declares a field of ``Settings`` whose value is from ``low`` to ``high``; None for no upper bound."""
    return field(default=default, metadata={"low": low} if high is None else {"low": low, "high": high})


@dataclass(frozen=True)
class Settings:
    """Checks its fields: integers are at least 1, and others are in their range, if they have one (``limited``)."""

    def __post_init__(self) -> None:
        for each in fields(self):
            name, limits = each.name, {key: each.metadata[key] for key in ("low", "high") if key in each.metadata}
            kind = each.type if isinstance(each.type, str) else formatannotation(each.type)
            value, optional = getattr(self, name), kind.endswith("None")
            if kind.startswith("int"):
                integer(name, value, **{"low": 1} | limits, optional=optional)
            elif limits:
                number(name, value, **limits, optional=optional)


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

    @property
    def path(self) -> Path:
        return self.out.expanduser().absolute()


@dataclass(frozen=True)
class TrainConfig(Settings):
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
    minutes: float | None = limited(None, _POSITIVE)
    batch: int = 10
    window: int = limited(768, 2)
    learning_rate: float = limited(3e-3, _POSITIVE)
    weight_decay: float = named(None, 0.1)
    warmup: float = field(default=0.02, metadata={"option": None, "low": _POSITIVE})
    decay: float = field(default=0.6, metadata={"option": None, "low": _POSITIVE})
    seed: int = limited(0, 0)
    evaluate_every_seconds: float = named(None, 300.0)
    compile: bool | None = None
    patience: int | None = None
    dropout: float = limited(0.0, 0, 0.99)
    recorded: bool = named(None, False)

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
class DistillConfig(Settings):
    """Target distributions and loss of a distilled draft.

    Args:
        top: Most likely tokens kept of the target's distribution. The others share one bucket.
        acceptance_share: Last fraction of the run, which changes from KL to the acceptance loss.
        teacher_share: Largest fraction of --minutes for sampling text and computing the target's distributions.
        disk_gigabytes: Disk space for the target's distributions during the run.
        generated_share: Fraction of the windows that the target samples (2310.08461, on-policy data).
    """

    top: int = 64
    acceptance_share: float = limited(0.3, 0, 1)
    teacher_share: float = named(None, 0.3)
    disk_gigabytes: float = 2.0
    generated_share: float = limited(0.0, 0, 1)


@dataclass(frozen=True)
class TextConfig(Settings):
    """Text to train a head on.

    Args:
        windows: Maximum number of training windows.
        generated_share: Fraction of the windows that the target samples. The others are cut from the files.
        writing_share: Largest fraction of --minutes in which the target may write.
        held_out: Held-out windows at each of two temperatures.
    """

    windows: int = 6400
    generated_share: float = limited(0.2, 0, 1)
    writing_share: float = limited(0.2, 0, 1)
    held_out: int = 32


@dataclass(frozen=True)
class HeadConfig(TextConfig):
    """Training text and loss of a head.

    Args:
        disk_gigabytes: Disk space for hidden states; by default 12, on a GPU 0. Other windows are recomputed.
        acceptance_share: Last fraction of the run, which changes from cross-entropy to the acceptance loss.
        discount: Factor of the loss per predicted token.
    """

    disk_gigabytes: float | None = limited(None, 0)
    acceptance_share: float = limited(0.3, 0, 1)
    discount: float = limited(0.8, 1e-6, 1)


@dataclass(frozen=True)
class AcceptanceConfig(TextConfig):
    """Size and training data of an acceptance head.

    Args:
        intermediate: Hidden units of the head.
    """

    windows: int = 256
    generated_share: float = limited(0.75, 0, 1)
    held_out: int = 16
    intermediate: int = 64


@dataclass(frozen=True)
class AttentionSettings(Settings):
    """Size of the attention of a head.

    Args:
        heads: Attention heads; by default the target's.
        kv_heads: Key-value heads; by default the target's.
    """

    heads: int | None = None
    kv_heads: int | None = None


@dataclass(frozen=True)
class FusedConfig(AttentionSettings):
    """Size of a head on three fused hidden states.

    Args:
        taps: Three layers whose inputs are fused, like 2,4,5.
        intermediate: Units of the MLPs.
        vocabulary: Size of the draft vocabulary: the target's most frequent tokens.
    """

    taps: tuple[int, ...] | None = None
    intermediate: int = 448
    vocabulary: int = 3072

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps is not None and len(self.taps) != 3:
            raise InvalidRequest(f"{len(self.taps)} taps; EAGLE-3 fuses three hidden states, low, middle and high")

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are fused, by default [2, n // 2, n - 3]."""
        return _checked_taps(self.taps or (min(2, layers - 1), layers // 2, max(layers - 3, 1)), layers, layers - 1)


def _checked_taps(taps: tuple[int, ...], layers: int, last: int) -> tuple[int, ...]:
    if not all(0 < tap <= last for tap in taps):
        raise InvalidRequest(f"taps {list(taps)} for a target of {layers} layers; expected 1 to {last}")
    return taps


@dataclass(frozen=True)
class UnrolledConfig(AttentionSettings):
    """Training of a layer that reads its own outputs.

    Args:
        depths: Unrolled steps in training.
        single_share: First fraction of the run, in which only one step is unrolled. It costs a third.
    """

    depths: int = 4
    single_share: float = limited(0.6, 0, 1)


@dataclass(frozen=True)
class Eagle3Config(UnrolledConfig, FusedConfig):
    """An EAGLE-3 head.

    Args:
        normed: EAGLE 3.1: norm each fused hidden state, and the outputs that the layer reads.
    """

    normed: bool = False


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
    retention: float = limited(0.7, 1e-6, 1)
    mask_token: int | None = limited(None, 0)


@dataclass(frozen=True)
class MtpTrainConfig(UnrolledConfig):
    """A multi-token-prediction layer.

    Args:
        intermediate: Units of the MLP.
    """

    intermediate: int = 768
    single_share: float = limited(0.5, 0, 1)


@dataclass(frozen=True)
class MedusaTrainConfig(Settings):
    """Medusa heads.

    Args:
        heads: Tokens predicted ahead, by one head each.
        layers: Residual layers of each head.
    """

    heads: int = 4
    layers: int = 1


@dataclass(frozen=True)
class BlockwiseTrainConfig(Settings):
    """Blockwise parallel heads.

    Args:
        heads: Tokens predicted ahead, by one head each.
        intermediate: Hidden units of each head.
    """

    heads: int = 4
    intermediate: int = 192


@dataclass(frozen=True)
class EarlyExitTrainConfig(Settings):
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
class DFlashTrainConfig(AttentionSettings):
    """A DFlash head.

    Args:
        block: Rows of a block. A DFlash head predicts one token less, a DSpark head as many.
        layers: Decoder layers.
        taps: Layers whose inputs are read, like 1,3,5,7; by default five, spread over the target.
        intermediate: Units of the MLPs; by default the target's.
        mask_token: Token id of the rows after the newest token; by default the target's rarest token.
        anchors: Blocks per window and training step, at random positions.
    """

    block: int = limited(8, 2)
    layers: int = 3
    taps: tuple[int, ...] | None = None
    intermediate: int | None = None
    mask_token: int | None = limited(None, 0)
    anchors: int = 96

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are read; ``layers`` stands for the target's normed output."""
        spread = {1 + round(i * (layers - 2) / 4) for i in range(5)}
        taps = self.taps or tuple(sorted(tap for tap in spread if tap > 0)) or (layers,)
        return _checked_taps(taps, layers, layers)


@dataclass(frozen=True)
class DSparkTrainConfig(DFlashTrainConfig):
    """A DSpark head, see also ``DFlashTrainConfig``.

    Args:
        markov_rank: Rank of the Markov head.
        gated: Gate the Markov head by each row's hidden state.
    """

    markov_rank: int = 128
    gated: bool = False


@dataclass(frozen=True)
class HeadKind:
    """A kind of heads that ``foretoken train`` trains.

    Attributes:
        settings: Its settings, with their defaults.
        title: Its name in model cards.
        help: The help of the command.
        method: Method that drafts with it.
        learning_rate: Default learning rate.
        data: Default settings of data and loss.
    """

    settings: Settings
    title: str
    help: str
    method: str
    learning_rate: float = HEAD_CONFIG.learning_rate
    data: HeadConfig = HeadConfig()

    @property
    def config(self) -> TrainConfig:
        return replace(HEAD_CONFIG, learning_rate=self.learning_rate)


HEADS: dict[str, HeadKind] = {
    "eagle3": HeadKind(
        Eagle3Config(),
        "EAGLE-3 head",
        "Train an EAGLE-3 head (20 minutes on two cores for the bundled target).",
        "eagle3",
    ),
    "peagle": HeadKind(
        PEagleConfig(),
        "P-EAGLE head",
        "Train a P-EAGLE head: an EAGLE-3 head that predicts all positions in one pass.",
        "eagle3",
    ),
    "mtp": HeadKind(
        MtpTrainConfig(),
        "multi-token-prediction layer",
        "Train a multi-token-prediction layer (30 minutes on two cores for the bundled target).",
        "mtp",
    ),
    "medusa": HeadKind(MedusaTrainConfig(), "Medusa heads", "Train Medusa heads.", "medusa", 6e-3),
    "blockwise": HeadKind(
        BlockwiseTrainConfig(), "blockwise parallel heads", "Train blockwise parallel heads.", "blockwise", 6e-3
    ),
    "early-exit": HeadKind(
        EarlyExitTrainConfig(),
        "adapter for an early exit",
        "Train the adapter that lets the target's first layers draft.",
        "early_exit",
    ),
    "dflash": HeadKind(
        DFlashTrainConfig(), "DFlash head", "Train a DFlash head: one pass drafts a block of tokens.", "dflash"
    ),
    "jetspec": HeadKind(
        DFlashTrainConfig(),
        "JetSpec head",
        "Train a JetSpec head: a DFlash head with causal blocks, by forward KL alone.",
        "jetspec",
        data=HeadConfig(acceptance_share=0.0, discount=1.0),
    ),
    "dspark": HeadKind(
        DSparkTrainConfig(),
        "DSpark head",
        "Train a DSpark head: a DFlash head whose tokens depend on those drafted before, with confidences.",
        "dspark",
    ),
}
"""The kinds of heads, by their name after ``foretoken train``."""
