"""Settings of a head's training data and loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from foretoken.core.checks import integer, number


@dataclass(frozen=True)
class HeadConfig:
    """Settings of a head's training data and loss.

    Args:
        windows: Greatest number of training windows.
        generated_share: Share of the windows that the target samples. The others are cut from the corpus.
        writing_share: Greatest share of the training time that the target may take to sample them.
        disk_gigabytes: Disk space for hidden states. Those that do not fit are recomputed each time. None for 12 on the
            CPU, and for 0 on a GPU, which recomputes them faster than a disk is read.
        held_out: Windows that the target samples from held-out files, at each of two temperatures.
        acceptance_share: Last share of the run, which changes from cross-entropy to the acceptance loss.
        discount: Factor of the loss per depth.
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

    def arguments(self) -> str:
        """Returns the command line options that give these settings."""
        return changed_options(self)


def changed_options(settings: object) -> str:
    """Returns the command line options for the fields of a dataclass that differ from their defaults."""
    usual = asdict(type(settings)())  # type: ignore[call-overload]
    values = asdict(settings)  # type: ignore[call-overload]
    changed = {name: value for name, value in values.items() if value != usual[name]}
    return " ".join(f"--{name.replace('_', '-')}{_argument(value)}" for name, value in changed.items())


def _argument(value: object) -> str:
    if value is True:
        return ""
    return " " + (",".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}")


HEAD = HeadConfig()
