"""Wrapped transformers modules of all families: results equal the module alone, refusals give the reason."""

import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.config import LANGUAGE_MODELS
from foretoken.models.families.family import supported
from foretoken.models.families.table import FAMILIES
from foretoken.models.hf.model import HFModel

from .families import difference, tiny

pytestmark = pytest.mark.slow

# Every way of attending that transformers 5.23 has among served families; the others are run by benchmarks/families.py.
SERVED = [
    "bert",
    "codegen",
    "cohere2",
    "deepseek_v2",
    "exaone4",
    "gemma2",
    "gemma3",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_oss",
    "gptj",
    "granite_swa",
    "hunyuan_v1_dense",
    "mimo_v2_flash",
    "minicpm3",
    "mistral",
    "modernbert-decoder",
    "olmo3",
    "opt",
    "phi",
    "smollm3",
    "stablelm",
    "xglm",
]
ROWS = "count the padded rows of a batch, so that a sequence's output would depend on its neighbours"
CACHE = "continuing from its cache gives other logits"
STATE = "keeps a state that cannot be rewound"
REFUSED = {
    "bart": ROWS,
    "gpt_neo": ROWS,
    "roformer": ROWS,
    "moshi": CACHE,
    "roberta": CACHE,
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "mamba": STATE,
    "doge": CACHE,
    "recurrent_gemma": STATE,
    "qwen3_next": STATE,
    "deepseek_v32": "indexed_attention",
    "lfm3": "conv",
    "openai-gpt": "does not take an explicit mask, positions and cache",
}


@pytest.mark.parametrize("family", SERVED)
def test_served_modules_equal_the_module_alone(family: str) -> None:
    module = tiny(family)
    assert difference(HFModel(module), module) < 1e-3


@pytest.mark.parametrize("family", REFUSED)
def test_refusals_name_the_reason(family: str) -> None:
    module = tiny(family)
    with pytest.raises(ModelLoadError, match=REFUSED[family]) as error:
        HFModel(module)
    assert str(error.value).startswith(type(module).__name__) and "\n" not in str(error.value)


def page() -> str:
    """The documentation's page of families."""
    return (Path(__file__).parents[2] / "docs" / "reference" / "families.md").read_text(encoding="utf-8")


def _sections() -> dict[str, list[str]]:
    """The families that each section of the documentation's table names, by the section's heading."""
    parts = re.split(r"^### (.+)\n", page(), flags=re.MULTILINE)[1:]
    first_cells = [re.sub(r"^(\|[^|]*)\|.*$", r"\1", text, flags=re.MULTILINE) for text in parts[1::2]]
    listed = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    lists = [[name for name in re.findall(r"`([\w.-]+)`", text) if name in listed] for text in first_cells]
    return dict(zip(parts[0::2], lists, strict=True))


def test_the_documentation_places_families_as_these_tests_do() -> None:
    sections = _sections()
    own = {name for name in (*FAMILIES, *LANGUAGE_MODELS) if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert sections["On our runtime"] == sorted(own)
    assert set(SERVED) - own <= set(sections["Through transformers"])
    assert set(REFUSED) - own <= set(sections["Refused"])
    others = {name for heading, names in sections.items() if heading != "On our runtime" for name in names}
    assert not own & others
    if transformers.__version__.startswith("5.23."):
        assert own | others == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_documentation_lists_features_left_to_transformers() -> None:
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| (.*?) ?\|$", page(), re.MULTILINE))
    limited = {name for name, family in FAMILIES.items() if family.refuses is not supported and name in rows}
    assert limited <= {name for name, limits in rows.items() if limits}


def test_the_documentation_lists_multimodal_checkpoints() -> None:
    (listed,) = re.findall(r"^## Multimodal checkpoints\n\n.*?\n\n(`.*?)\.\n", page(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == sorted(LANGUAGE_MODELS)
