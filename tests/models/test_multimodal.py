"""The language model of a multimodal checkpoint is loaded alone, and equals the whole model on text."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from foretoken.core.draft import Draft
from foretoken.models.decoder import Decoder
from foretoken.models.families.config import LANGUAGE_MODELS, text_part
from foretoken.models.hf.tiny_random import tiny_of
from foretoken.models.loading import load_model, report_language_model_alone

from .trees import repeating

pytestmark = pytest.mark.slow

TREE = repeating((-1, 0, -1, 0, 2, 4))
# What published models have where a configuration's defaults do not fit together, and smaller images.
SETTINGS: dict[str, dict[str, Any]] = {
    "glm4v": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    },
    "qwen2_vl": {"vision_config": {"depth": 1}},
}
AUDIO = {"qwen2_audio": "Qwen2AudioForConditionalGeneration", "voxtral": "VoxtralForConditionalGeneration"}


def saved(kind: str, folder: Path, **text: Any) -> Any:
    """Saves a tiny random multimodal module."""
    names = {**modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **AUDIO}
    config = CONFIG_MAPPING[kind](**({"text_config": text} if text else SETTINGS.get(kind, {})))
    module = tiny_of(getattr(transformers, names[kind]), config, {})
    module.save_pretrained(folder)
    return module


def text(count: int) -> list[int]:
    return [3 + (17 * count + 7 * at * at + at) % 61 for at in range(count)]


def check(folder: Path, module: Any) -> None:
    model = load_model(folder, "float32", "cpu")
    assert isinstance(model, Decoder)
    handles, drafts = [model.open(text(count)) for count in (3, 12, 30)], (Draft.chain([8, 9]), Draft.empty(), TREE)
    for handle, draft, scores in zip(handles, drafts, model.score(handles, drafts), strict=True):
        for node in range(-1, len(draft)):
            tokens = torch.tensor([[*handle.tokens, *(draft.ids[i] for i in draft.path(node))]])
            with torch.no_grad():
                expected = module(input_ids=tokens, use_cache=False).logits[0, -1]
            assert (scores.logits[node + 1] - expected).abs().max() < 1e-4, node


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_the_language_model_alone_computes_the_same(kind: str, tmp_path: Path) -> None:
    check(tmp_path, saved(kind, tmp_path))


def test_a_language_model_of_another_family(tmp_path: Path) -> None:
    check(tmp_path, saved("llava", tmp_path, model_type="mistral", sliding_window=6))


def test_loading_says_once_that_images_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved("llava", tmp_path)
    report_language_model_alone.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load_model(tmp_path, "float32", "cpu")
    said = [record.getMessage() for record in caplog.records if "multimodal" in record.getMessage()]
    assert said == [f"{tmp_path} is multimodal; its language model is loaded alone, so images and sound are not read"]


def test_older_files_have_the_language_models_fields_beside_the_others(tmp_path: Path) -> None:
    module = saved("qwen2_vl", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    inner = config.pop("text_config")
    file.write_text(json.dumps({**inner, **config}))
    check(tmp_path, module)


def test_other_checkpoints_have_no_text_part() -> None:
    assert text_part({"model_type": "llama", "text_config": {}}) is None
    assert text_part({"model_type": "llava"}) is None
    assert text_part({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}) is None
