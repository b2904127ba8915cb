"""The systems that can race: their capabilities and environments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.speculation import METHODS

BOOT = Path(__file__).with_name("boot.py")


@dataclass(frozen=True)
class Peer:
    """One system.

    Attributes:
        home: Its virtual environment below ``folder()``; "" is the current one.
        methods: Speculation methods.
        batches: Whether it takes several prompts at once.
        fixed_depth: Whether the depth is chosen when it loads.
        quantizations: Quantizations of the target; "" is bf16.
    """

    name: str
    home: str = ""
    methods: tuple[str, ...] = ("draft_model",)
    batches: bool = False
    fixed_depth: bool = False
    quantizations: tuple[str, ...] = ("",)

    @property
    def python(self) -> Path:
        """The interpreter of its virtual environment."""
        return folder() / self.home / "bin" / "python" if self.home else Path(sys.executable)

    @property
    def command(self) -> list[str]:
        """The command that starts its process."""
        return [str(self.python), "-P", str(BOOT), self.name]

    def refusal(self, batch: int, quantization: str) -> str:
        """Returns why it cannot race, in one line; empty if it can."""
        if not self.python.exists():
            return f"{self.name} is not set up ({self.python} is missing); `make peers` does it. Racing without it."
        if batch > 1 and not self.batches:
            return f"{self.name} takes one prompt at a time with a draft model. Racing batches of {batch} without it."
        if quantization not in self.quantizations:
            return f"{self.name} has no {quantization or 'bf16'} target here. Racing without it."
        return ""


OURS = Peer("foretoken", methods=tuple(METHODS), batches=True, quantizations=("", "int8"))
PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", methods=("draft_model", "ngram")),
        Peer("openvino", home="openvino", quantizations=("", "int8")),
        Peer("vllm", home="vllm", methods=("draft_model", "ngram"), batches=True, fixed_depth=True),
    )
}


def folder() -> Path:
    """Returns the folder in which ``make peers`` keeps the environments."""
    return zoo.cache_folder() / "peers"


def chosen(names: str | Sequence[str]) -> list[Peer]:
    """Returns the peers of a comma-separated list; "none" is an empty list. Raises InvalidRequest for unknown ones."""
    requested = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    requested = [name for name in requested if name and name != "none"]
    unknown = [name for name in requested if name not in PEERS]
    if unknown:
        raise InvalidRequest(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}, or none")
    return [PEERS[name] for name in dict.fromkeys(requested)]
