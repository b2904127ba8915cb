"""A checkpoint with any values in its JSON files loads and generates, or one line names the error.

FORETOKEN_FUZZ_VALUES sets how many values every field takes, 1 by default; 100 is all of them. FORETOKEN_FUZZ_SEED
chooses others.
"""

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.core.errors import InvalidRequest, ModelLoadError

from . import malformed
from .malformed import Case, Kind

VALUES = int(os.environ.get("FORETOKEN_FUZZ_VALUES", "1"))
SEED = int(os.environ.get("FORETOKEN_FUZZ_SEED", "24"))
SECONDS = 30  # for one case; most take milliseconds
MOST_BYTES = 2**28  # that one case may add to the most that this process ever took


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside what takes longer."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(case: Case, kind: Kind, folder: Path, target: Path) -> str | None:
    """Returns the fault of the case's outcome; None if it has none."""
    malformed.apply(case, kind.folder, folder)
    before = peak()
    try:
        with limited(SECONDS):
            kind.use(folder, target)
    except (InvalidRequest, ModelLoadError) as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 1000:
            return f"{case}: not one line: {text!r:.300}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{case}: {type(error).__name__}: {error!s:.200}"
    grown = peak() - before
    return f"{case}: took {grown / 2**20:.0f} MiB" if grown > MOST_BYTES else None


def peak() -> int:
    """Bytes that this process held at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture(scope="module")
def checkpoints(tiny_pair: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    root = tmp_path_factory.mktemp("kinds")
    made = {kind.name: kind for kind in malformed.kinds(root, tiny_pair.target, len(tokenizer))}
    for kind in made.values():
        if kind.method == "target":
            malformed.add_tokenizer(kind.folder, tiny_pair.target)
    return made


NAMES = (
    "llama",
    "gemma3",
    "smollm3",
    "gpt2",
    "phi",
    "t5",
    "bart",
    "compressed-tensors",
    "torchao",
    "gptq",
    "awq",
    "compressed w4 32 zeros",
    "sharded",
    "eagle3",
    "speculators",
    "eagle1",
    "medusa",
    "blockwise",
    "early_exit",
    "learned",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_every_field_of_every_configuration(checkpoints, tiny_pair, tmp_path, name):
    kind = checkpoints[name]
    kind.use(kind.folder, tiny_pair.target)
    chosen = malformed.cases(kind, random.Random(f"{SEED} {name}"), VALUES)
    wrong = [result for case in chosen if (result := outcome(case, kind, tmp_path / "case", tiny_pair.target))]
    assert not wrong, "\n".join(wrong)


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))


@pytest.fixture
def llama(tiny_pair: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "llama"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1, which should be greater than or equal to 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers = None, which should be a valid integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, which should be less than or equal to 10000"),
        ({"num_hidden_layers": 9_000}, "num_hidden_layers = 9000, but the checkpoint holds .* tensors"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None, which should be a valid integer"),
        ({"max_position_embeddings": -5}, "max_position_embeddings = -5, which should be greater than or equal to 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6', which should be a valid number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan, which should be a finite number"),
        ({"rope_parameters": None, "rope_theta": -1}, "rope_theta = -1, which should be greater than or equal to 1"),
        ({"rope_parameters": [1]}, "rope_parameters = .*, which should be a valid dictionary"),
        ({"model_type": ["llama"]}, "model_type = .*, which should be a valid string"),
        ({"layer_types": ["full_attention"]}, "1 entries in layer_types, which should be num_hidden_layers = 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, which should be a multiple of num_key_value_heads = 3"),
        ({"eos_token_id": "x"}, "eos_token_id.0 = 'x', which should be a valid integer"),
        ({"hidden_size": None, "vocab_size": 0, "head_dim": 0.5}, "vocab_size = 0.*hidden_size = None.*head_dim = 0.5"),
        ({"hidden_size": [[1] * 500] * 500}, "hidden_size = .*, which should be a valid integer"),
    ],
    ids=lambda p: str(p)[:40] if isinstance(p, dict) else "",
)
def test_each_wrong_field_is_named_with_its_value_and_range(llama: Path, changes: dict[str, Any], said: str) -> None:
    edit(llama, **changes)
    with pytest.raises(ModelLoadError, match=said) as error:
        LLM(llama, dtype="float32", device="cpu")
    assert str(llama) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", malformed.DEEP, "nested too deeply"),
        ("config.json", '"llama"', "holds a str; expected an object"),
        ("generation_config.json", "[]", "holds a list; expected an object"),
        ("generation_config.json", '{"eos_token_id": [0, -1]}', "eos_token_id.1 = -1"),
        ("tokenizer_config.json", malformed.DEEP, "nested too deeply"),
        ("tokenizer_config.json", '{"tokenizer_class": ["Junk"]}', "tokenizer_class = .*, which should be a valid"),
        ("tokenizer.json", "[]", "no tokenizer loads"),
    ],
)
def test_each_wrong_file_is_named(llama: Path, file: str, text: str, said: str) -> None:
    (llama / file).write_text(text)
    with pytest.raises(ModelLoadError, match=said) as error:
        LLM(llama, dtype="float32", device="cpu")
    assert str(llama) in str(error.value) and "\n" not in str(error.value)


def test_ids_beyond_the_vocabulary_end_nothing(llama: Path) -> None:
    edit(llama, "generation_config.json", eos_token_id=[0, 10**6])
    llm = LLM(llama, dtype="float32", device="cpu")
    assert len(llm.generate("x", malformed.PARAMS)[0].outputs[0].token_ids) == malformed.PARAMS.max_tokens
