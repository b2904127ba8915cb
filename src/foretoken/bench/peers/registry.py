"""The systems that can race: their capabilities and environments."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretoken import zoo
from foretoken.bench.peers import llamacpp
from foretoken.core.errors import InvalidRequest
from foretoken.models.options import QUANTIZATIONS
from foretoken.speculation import METHODS

BOOT = Path(__file__).with_name("boot.py")

# File types of llama-quantize that our own runtime computes too.
GGUF_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS"),
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
)
_FOUR_BIT = ("Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")
_INT4 = tuple(name for name in QUANTIZATIONS if name.startswith("int4"))


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


@dataclass(frozen=True)
class Peer:
    """One system."""

    name: str
    home: str = ""  # its virtual environment below ``folder()``; "" is the current one
    methods: tuple[str, ...] = ("draft_model",)  # speculation methods
    batches: bool = False  # whether it takes several prompts at once
    fixed_depth: bool = False  # whether the depth is chosen when it loads
    # how it stores the target, by the race's quantization; "" is bf16
    weights: Mapping[str, str] = field(default_factory=lambda: {"": "bf16"}, hash=False)
    reads_gguf: bool = False  # whether its models can be GGUF files
    program: str = ""  # a file in its environment that it needs besides Python

    @property
    def place(self) -> Path:
        return folder() / self.home if self.home else Path(sys.prefix)

    @property
    def python(self) -> Path:
        """The interpreter of its virtual environment."""
        return self.place / "bin" / "python" if self.home else Path(sys.executable)

    @property
    def missing(self) -> Path | None:
        """A file that it needs and that is not there; None if it is set up."""
        return next((file for file in (self.python, self.place / self.program) if not file.exists()), None)

    def command(self, api: bool = False) -> list[str]:
        return [str(self.python), "-P", str(BOOT), f"{self.name}_api" if api else self.name]

    def refusal(self, batch: int, quantization: str, gguf: bool = False) -> str:
        """Returns why it cannot race, in one line; empty if it can. gguf: Whether a model is a GGUF file."""
        if self.missing:
            return f"{self.name} is not set up ({self.missing} is missing); `make peers` does it. Racing without it."
        if batch > 1 and not self.batches:
            return f"{self.name} takes one prompt at a time with a draft model. Racing batches of {batch} without it."
        if gguf and not self.reads_gguf:
            return f"{self.name} takes no GGUF file here, only checkpoints (--quantization). Racing without it."
        if quantization not in self.weights and not gguf:
            return f"{self.name} has no {quantization or 'bf16'} target here. Racing without it."
        return ""


OURS = Peer(
    "foretoken",
    methods=tuple(METHODS),
    batches=True,
    weights={"": "bf16"} | _same(QUANTIZATIONS) | _same(GGUF_TYPES),
    reads_gguf=True,
)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", methods=("draft_model", "ngram")),
        Peer(
            "openvino",
            home="openvino",
            weights={"": "bf16", "int8": "int8", "Q8_0": "int8"}
            | _same(_INT4)
            | {"int4": "int4-g32"}
            | dict.fromkeys(_FOUR_BIT, "int4-g128"),
        ),
        Peer("vllm", home="vllm", methods=("draft_model", "ngram"), batches=True, fixed_depth=True),
        Peer(
            "llamacpp",
            home="llamacpp",
            methods=("draft_model", "ngram"),
            fixed_depth=True,
            weights={"": "BF16", "int8": "Q8_0"} | dict.fromkeys(_INT4, "Q4_0") | _same(GGUF_TYPES),
            reads_gguf=True,
            program=f"{llamacpp.BUILD}/bin/llama-server",
        ),
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


def check_quantization(name: str) -> str:
    """Returns a quantization of a race under its usual spelling. Raises InvalidRequest that lists the known ones."""
    known = {known.lower(): known for known in OURS.weights}
    if name.lower() not in known:
        names = ", ".join((*QUANTIZATIONS, *GGUF_TYPES))
        raise InvalidRequest(f"quantization {name!r} is not known to the race; known: {names}")
    return known[name.lower()]
