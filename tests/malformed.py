"""Checkpoints of every kind that is loaded, small and whole, and changes that make their JSON files malformed."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken import LLM, SamplingParams

from .models.heads import tiny as heads
from .models.seq2seq import tiny as seq2seq
from .models.test_packed import save_packed
from .models.test_quantize import COMPRESSED, TORCHAO, store
from .models.tiny import ARCHITECTURES, Tiny
from .propose.heads import random_head
from .propose.test_early_exit import trained as trained_exit

MISSING = object()
DEEP = "[" * 100_000 + "]" * 100_000
WHOLE = ("", "[]", "null", '"x"', "17", "{", "{}", DEEP, '{"a": ' * 50_000, '{"x": "\\ud800"}')
VALUES: tuple[Any, ...] = (
    MISSING,
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    7,
    10_001,
    10**9,
    2**31,
    2**63,
    10**40,
    -(10**40),
    0.5,
    -1.5,
    1e-320,
    1e38,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "default",
    "yarn",
    "\ud800",
    [],
    ["x"],
    [1, 2],
    [None] * 3,
    [[[[]]]],
    {},
    {"x": 1},
    {"rope_type": "linear"},
)
PARAMS = SamplingParams(max_tokens=4, min_tokens=2, temperature=0.0)


@dataclass(frozen=True)
class Case:
    """One changed file of a checkpoint: the field at ``path`` has ``value``, or, without a path, the whole text."""

    kind: str
    file: str
    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        value = "missing" if self.value is MISSING else f"{self.value!r:.40}"
        return f"{self.kind}/{self.file}: {'.'.join(map(str, self.path)) or 'everything'} = {value}"


@dataclass(frozen=True)
class Kind:
    """A checkpoint in ``folder``.

    method: the speculative method that it is given to, or "target". files: those that are changed. within: the field of
    config.json whose parts alone are changed, where another kind has the same fields.
    """

    name: str
    folder: Path
    method: str
    files: tuple[str, ...] = ("config.json",)
    within: str | None = None

    def use(self, folder: Path, target: Path) -> None:
        """Load the checkpoint in ``folder`` as this kind is loaded, and generate."""
        options: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
        if self.method == "target":
            llm = LLM(folder, **options)
        else:
            config = {"method": self.method, "model": str(folder), "num_speculative_tokens": 2}
            if self.method == "learned":
                config |= {"method": "draft_model", "model": str(target)}
                config |= {"draft_stop": {"rule": "learned", "model": str(folder)}}
            llm = LLM(target, speculative_config=config, **options)
        llm.generate([[5, 6, 7]], PARAMS)


def kinds(root: Path, target: Path, vocab: int) -> Iterator[Kind]:
    """Every kind, each in a folder of its own with the tokenizer of ``target``."""
    sizes = {"vocab_size": vocab}
    generation = ("config.json", "generation_config.json")
    files = {"llama": (*generation, "tokenizer_config.json"), "gpt2": generation, "t5": generation}
    for name in ("llama", "gemma3", "smollm3", "gpt2", "phi"):
        tiny = ARCHITECTURES[name]
        Tiny(tiny.family, {**tiny.config, **sizes}, tiny.native, tiny.eager).save(root / name)
        yield Kind(name, root / name, "target", files.get(name, ("config.json",)))
    for name in ("t5", "bart"):
        seq2seq.save(name, root / name, **sizes)
        yield Kind(name, root / name, "target", files.get(name, ("config.json",)))
    for name, settings in (("compressed-tensors", COMPRESSED), ("torchao", TORCHAO)):
        tiny = ARCHITECTURES["llama"]
        Tiny(tiny.family, {**tiny.config, **sizes}).save(root / name)
        store(root / name, settings)
        yield Kind(name, root / name, "target", within="quantization_config")
    for name in ("gptq", "awq", "compressed w4 32 zeros"):
        save_packed(name, root / f"{name} dequantized", root / name, **sizes)
        yield Kind(name, root / name, "target", within="quantization_config")
    tiny = ARCHITECTURES["llama"]
    Tiny(tiny.family, {**tiny.config, **sizes}).build().save_pretrained(root / "sharded", max_shard_size="20KB")
    yield Kind("sharded", root / "sharded", "target", ("model.safetensors.index.json",))

    config, tensors = heads.eagle3(vocab=vocab)
    yield Kind("eagle3", heads.save(root / "eagle3", config, tensors), "eagle3")
    own = ("draft_vocab_size", "target_hidden_size", "model_type")
    layer = {name: config.pop(name) for name in list(config) if name not in own}
    taps = layer.pop("foretoken_taps")
    nested = config | {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {"use_aux_hidden_state": True},
    }
    yield Kind("speculators", heads.save(root / "speculators", nested, tensors), "eagle3")
    yield Kind("eagle1", heads.save(root / "eagle1", *heads.eagle1(vocab=vocab)), "eagle")
    yield Kind("medusa", heads.save(root / "medusa", *heads.medusa(vocab=vocab)), "medusa")
    yield Kind("blockwise", heads.save(root / "blockwise", *heads.blockwise()), "blockwise")
    yield Kind("early_exit", trained_exit(root / "early_exit"), "early_exit")
    yield Kind("learned", random_head(root / "learned", hidden=64), "learned")


def add_tokenizer(folder: Path, target: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / file, folder / file)


def fields(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all fields, those of nested objects and lists too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from fields(inner, (*path, key))


def cases(kind: Kind, random_: random.Random, each: int) -> Iterator[Case]:
    """``each`` values for every field of every JSON file, and as many texts for the whole file."""
    for file in kind.files:
        for text in random_.sample(WHOLE, min(each, len(WHOLE))):
            yield Case(kind.name, file, (), text)
        for path in fields(json.loads((kind.folder / file).read_text())):
            if kind.within in (None, path[0]):
                for value in random_.sample(VALUES, min(each, len(VALUES))):
                    yield Case(kind.name, file, path, value)


def apply(case: Case, source: Path, folder: Path) -> None:
    """Make ``folder`` what the case says of the checkpoint in ``source``; what does not change is linked."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in source.iterdir():
        if file.name != case.file:
            (folder / file.name).symlink_to(file)
    if not case.path:
        (folder / case.file).write_text(case.value)
        return
    content = copy.deepcopy(json.loads((source / case.file).read_text()))
    inner = content
    for key in case.path[:-1]:
        inner = inner[key]
    if case.value is MISSING:
        del inner[case.path[-1]]
    else:
        inner[case.path[-1]] = case.value
    (folder / case.file).write_text(json.dumps(content))
