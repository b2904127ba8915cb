"""The systems that can be raced: what each can do, and where its environment is."""

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

    home: its environment below ``folder()``; "" is the one that runs this. batches: takes several prompts at once.
    fixed_depth: the depth is chosen when it loads. quantizations: besides bf16, which "" stands for.
    """

    name: str
    home: str = ""
    methods: tuple[str, ...] = ("draft_model",)
    batches: bool = False
    fixed_depth: bool = False
    quantizations: tuple[str, ...] = ("",)

    @property
    def python(self) -> Path:
        return folder() / self.home / "bin" / "python" if self.home else Path(sys.executable)

    @property
    def command(self) -> list[str]:
        return [str(self.python), "-P", str(BOOT), self.name]

    def refusal(self, batch: int, quantization: str) -> str:
        """Why it sits out, in one line; empty when it can race."""
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
    """Where ``make peers`` keeps the environments."""
    return zoo.cache_folder() / "peers"


def chosen(names: str | Sequence[str]) -> list[Peer]:
    """The peers of a comma-separated list; "none" is nobody. Raises InvalidRequest for an unknown one."""
    wanted = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    wanted = [name for name in wanted if name and name != "none"]
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise InvalidRequest(f"unknown peer {unknown[0]!r}; known: {', '.join(PEERS)}, or none")
    return [PEERS[name] for name in dict.fromkeys(wanted)]
