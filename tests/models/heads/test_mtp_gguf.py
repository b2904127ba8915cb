"""MTP layers in GGUF files draft as those of the checkpoint that was converted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.gguf_converter import convert
from tests.models.heads.mtp_files import MTP_FAMILIES, MtpReference
from tests.models.plain import text
from tests.models.test_native import needs_kernels

from foretoken.models.heads.mtp import has_mtp
from foretoken.models.heads.mtp_loading import load_mtp
from foretoken.models.loading import load_model

pytestmark = needs_kernels

ARCHITECTURES = {
    "qwen3.5": "qwen35",
    "qwen3.5-experts": "qwen35moe",
    "glm4-moe": "glm4moe",
    "glm4-moe-lite": "deepseek2",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_a_file_s_layer_drafts_as_the_checkpoint_s(name: str, tmp_path: Path) -> None:
    family = MTP_FAMILIES[name]
    if name == "glm4-moe-lite":  # a file says how many layers are dense, which come first
        settings = {**family.target.config, "mlp_layer_types": ["dense", "sparse"]}
        family = replace(family, target=replace(family.target, config=settings))
    reference = MtpReference(family)
    folder = reference.save(tmp_path / "checkpoint")
    config = {**family.target.config, **reference.target.config.to_dict()}
    file = convert(folder, config, ARCHITECTURES[name], tmp_path / "model.gguf", next_layers=1)
    assert has_mtp(file)
    target = load_model(file, "float32", "cpu")
    assert target.num_layers == len(reference.target.model.layers)
    tokens = text(20, 3)
    hidden = reference(tokens[:-1]).hidden_states[-1][0]
    expected, *_ = reference.layer(0, tokens[1:], hidden)
    net = load_mtp(target, None, None, file, True, True).net
    ours = net.teacher_forced(tokens[1:], net.features(hidden))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
