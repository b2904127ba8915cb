"""Every dense family computes what transformers computes, on both runners, in plain passes, chains and trees."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture, supports
from foretoken.models.families.table import FAMILIES
from foretoken.models.loading import load_model

from .dense import CASES, saved
from .tiny import ARCHITECTURES, only_runner
from .trees import repeating

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
LENGTHS = (3, 12, 40)
TREE = repeating((-1, 0, -1, 0, 2, 4))
DRAFTS = (Draft.chain([8, 9, 7, 5]), Draft.empty(), TREE)
QUANTIZED = (
    "bloom",
    "youtu",
    "cohere",
    "falcon, two norms",
    "gemma4, one matrix for keys and values",
    "gpt2",
    "granite",
    "olmo2",
    "starcoder2",
)


def text(count: int) -> list[int]:
    return [3 + (17 * count + 7 * at * at + at) % 61 for at in range(count)]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("dense")
    return folder, saved(request.param, folder)


def alone(module: Any, tokens: list[int]) -> torch.Tensor:
    """The logits after a text, by transformers."""
    return after(module, (tuple(tokens),))[0]


@lru_cache(maxsize=16)  # both runners are compared with the same texts, one after the other
def after(module: Any, texts: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """The logits after each text, by transformers. They are padded on the right, where no row attends to."""
    width = max(map(len, texts))
    with torch.no_grad():
        ids = torch.tensor([[*each, *[0] * (width - len(each))] for each in texts])
        logits: torch.Tensor = module(ids, use_cache=False).logits
    return logits[torch.arange(len(texts)), [len(each) - 1 for each in texts]]


@pytest.mark.parametrize("runner", ["compiled", "torch", *(["cuda"] if torch.cuda.is_available() else [])])
def test_logits_of_ragged_batches_are_those_of_transformers(case: tuple[Path, Any], runner: str) -> None:
    folder, module = case
    with only_runner(runner):
        model = load_model(folder, "float32", "cuda" if runner == "cuda" else "cpu", "native")
    handles, drafts = [model.open(text(count)) for count in LENGTHS], list(DRAFTS)
    for step in range(2):
        for handle, draft, scores in zip(handles, drafts, model.score(handles, drafts), strict=True):
            nodes = range(-1, len(draft))
            expected = after(module, tuple((*handle.tokens, *(draft.ids[i] for i in draft.path(n))) for n in nodes))
            for node in nodes:
                assert (scores.logits[node + 1] - expected[node + 1]).abs().max() < TOLERANCE, (step, node)
        model.commit(handles, [[*(d.ids[i] for i in d.path(len(d) - 1)), 9] for d in drafts])
        drafts = drafts[1:] + drafts[:1]


def test_greedy_text_is_that_of_transformers(case: tuple[Path, Any]) -> None:
    folder, module = case
    model = load_model(folder, "float32", "cpu", "native")
    handles = [model.open(text(count)) for count in LENGTHS]
    for _ in range(8):
        best = [[int(s.logits[-1].argmax())] for s in model.score(handles, [Draft.empty()] * len(handles))]
        model.commit(handles, best)
    for handle, count in zip(handles, LENGTHS, strict=True):
        assert len(handle.tokens) == count + 8
        with torch.no_grad():  # each token is the best after those before it, so the text is transformers' own
            logits = module(torch.tensor([handle.tokens]), use_cache=False).logits[0]
        assert handle.tokens[count:] == logits[count - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_what_shares_their_pass(case: tuple[Path, Any], dtype: str) -> None:
    with only_runner("compiled"):
        model = load_model(case[0], dtype, "cpu", "native")
    check_rows(model)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_families_stay_close_and_rows_independent(name: str, scheme: str, tmp_path: Path) -> None:
    module = saved(name, tmp_path)
    with only_runner("compiled"):
        model = load_model(tmp_path, "float32", "cpu", "native", quantization=scheme)
    (scores,) = model.score([model.open(text(12))], [Draft.empty()])
    error = (scores.logits[0] - alone(module, text(12))).std() / alone(module, text(12)).std()
    assert error < (0.15 if scheme == "int8" else 0.9)
    check_rows(model)


def check_rows(model: Model) -> None:
    """The rows of a batch with a tree and a chain have the bits of plain steps over their paths alone."""
    handles = [model.open(text(count)) for count in LENGTHS]
    for count, draft, scores in zip(LENGTHS, DRAFTS, model.score(handles, DRAFTS), strict=True):
        leaves = [node for node in range(-1, len(draft)) if node not in draft.parents]
        for path in map(draft.path, leaves):
            handle = model.open(text(count))
            for node in (-1, *path):
                if node >= 0:
                    model.commit([handle], [[draft.ids[node]]])
                (plain,) = model.score([handle], [Draft.empty()])
                assert torch.equal(plain.logits[-1], scores.logits[node + 1]), (count, node)
            model.close(handle)


def test_every_family_of_the_table_is_tested() -> None:
    near = {tiny.build().config.model_type for tiny in ARCHITECTURES.values() if tiny.native}
    tested = near | {family for family, _ in CASES.values()}
    same = {"gpt-sw3"}  # another name of gpt2
    assert set(FAMILIES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= tested | same


WRONG: tuple[Any, ...] = (None, -1, 0, "x", [], {}, 10**9, True, 0.5)


def damaged(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies of a config.json with one value, at the top or below it, that is wrong or missing."""
    for name, value in config.items():
        if name == "model_type":
            continue
        yield {key: other for key, other in config.items() if key != name}
        yield from ({**config, name: wrong} for wrong in WRONG)
        for inner in value if isinstance(value, dict) else ():
            yield from ({**config, name: {**value, inner: wrong}} for wrong in WRONG)


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_config_is_read_or_refused(name: str) -> None:
    family, config = CASES[name]
    whole = json.loads(CONFIG_MAPPING[family](**config).to_json_string(use_diff=False)) | {"model_type": family}
    for given in damaged(whole):
        with suppress(ModelLoadError):
            if supports(given):
                Architecture.of(given)


# The default of GLM-4.5 in transformers has heads of 42 numbers, of which half cannot be rotated in pairs.
@pytest.mark.parametrize(
    "family", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in FAMILIES and name != "glm4_moe"]
)
def test_the_default_config_is_computed(family: str) -> None:
    assert Decoder.supports({**CONFIG_MAPPING[family]().to_dict(), "model_type": family})
