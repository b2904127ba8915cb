"""Families of transformers behind the wrapper: what is served equals the module alone, what is refused says why."""

from __future__ import annotations

import pytest

from foretoken.core.errors import ModelLoadError
from foretoken.models.hf import HFModel

from .families import difference, tiny

# Every way of attending that transformers 5.23 has among served families; the others are run by benchmarks/families.py.
SERVED = [
    "bert", "codegen", "cohere2", "deepseek_v2", "exaone4", "gemma2", "gemma3", "gemma3n_text",
    "gemma4_text", "gpt2", "gpt_bigcode", "gpt_oss", "gptj", "granite_swa", "hunyuan_v1_dense", "mimo_v2_flash",
    "minicpm3", "mistral", "modernbert-decoder", "olmo3", "opt", "phi", "smollm3", "stablelm", "xglm",
]  # fmt: skip
ROWS = "count the padded rows of a batch, so that a sequence's output would depend on its neighbours"
CACHE = "continuing from its cache gives other logits"
STATE = "keeps a state that cannot be rewound"
REFUSED = {
    "bart": ROWS, "gpt_neo": ROWS, "roformer": ROWS, "moshi": CACHE, "roberta": CACHE,
    "bloom": "ALiBi", "mpt": "ALiBi", "mamba": STATE, "doge": CACHE, "recurrent_gemma": STATE, "qwen3_next": STATE,
    "llama4_text": "chunked_attention", "deepseek_v32": "indexed_attention", "lfm3": "conv",
    "openai-gpt": "does not take an explicit mask, positions and cache",
}  # fmt: skip


@pytest.mark.parametrize("family", SERVED)
def test_what_is_served_equals_the_module_alone(family: str) -> None:
    module = tiny(family)
    assert difference(HFModel(module), module) < 1e-3


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused_says_why(family: str) -> None:
    module = tiny(family)
    with pytest.raises(ModelLoadError, match=REFUSED[family]) as error:
        HFModel(module)
    assert str(error.value).startswith(type(module).__name__) and "\n" not in str(error.value)
