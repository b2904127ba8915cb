"""GGUF files in four bits through the whole engine: every text is that of plain decoding, byte for byte."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as K
from tests.exactness.test_hybrid_texts import SAMPLING, texts
from tests.models.gguf_converter import convert
from tests.models.heads.mtp_files import MTP_FAMILIES, MtpReference
from tests.models.test_native import needs_kernels

from foretoken import LLM

pytestmark = [pytest.mark.slow, needs_kernels]

METHODS: dict[str, dict[str, Any]] = {
    "lookup": {"method": "ngram"},
    "its first layers": {"method": "early_exit", "exit_layer": 1},
    "its MTP layer": {"method": "mtp"},
    "tree of a draft model": {"method": "draft_model", "tree": "top_k", "top_k": 2},
}


@pytest.fixture(scope="module", params=["qwen3.5", "glm4-moe"], ids=["hybrid", "experts"])
def target(request: pytest.FixtureRequest, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and its file ``model.gguf``."""
    family = MTP_FAMILIES[request.param]
    settings = {**family.target.config, "vocab_size": 400}
    reference = MtpReference(replace(family, target=replace(family.target, config=settings)))
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = reference.save(folder / "checkpoint")
    tokenizer.save_pretrained(checkpoint)
    architecture = {"qwen3.5": "qwen35", "glm4-moe": "glm4moe"}[request.param]
    config = reference.target.config.to_dict()
    convert(checkpoint, config, architecture, folder / "model.gguf", K.Q4_0, next_layers=1)
    return folder


def loaded(target: Path, sequences: int, **more: Any) -> LLM:
    file = target / "model.gguf"
    return LLM(
        file, tokenizer=target / "checkpoint", dtype="float32", max_num_seqs=sequences, max_model_len=512, **more
    )


@pytest.fixture(scope="module")
def wanted(target: Path) -> dict[str, list[str]]:
    """Plain decoding, one request at a time."""
    llm = loaded(target, 1)
    return {sampling: texts(llm, sampling, speculative_tokens=0) for sampling in SAMPLING}


@pytest.mark.parametrize("method", METHODS)
def test_every_text_equals_plain_decoding(method: str, target: Path, wanted: dict[str, list[str]]) -> None:
    config = dict(METHODS[method])
    draft = {"draft_model": target / "checkpoint"} if config["method"] == "draft_model" else {}
    llm = loaded(target, 8, speculative_config=config, **draft)
    for sampling in SAMPLING:
        assert texts(llm, sampling, speculative_tokens=4) == wanted[sampling]
