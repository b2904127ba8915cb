import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from foretoken.core.errors import InvalidRequest
from foretoken.train.shapes import T5Shape
from foretoken.train.widen import checkpoint as up
from foretoken.train.widen import seq2seq as widen_seq2seq
from foretoken.train.widen.llama import WideShape
from foretoken.train.widen.seq2seq import head_groups

from .repair_script import repair

SMALL = T5Shape(32, 48, 2, 3, 2, 16)
WIDE = T5Shape(80, 160, 5, 4, 5, 16)
SOURCE = torch.arange(2, 66).view(2, 32)
TARGET = torch.arange(40, 80).view(2, 20)


def source(folder: Path, tokenizer: Any, tied: bool, **changes: Any) -> Path:
    model = repair.new_model(SMALL, tokenizer, seed=3, tied=tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            elif "relative" in name:
                parameter.mul_(20)
    before = tokenizer("x")["input_ids"]
    repair.save(model, tokenizer, folder, tied)
    assert tokenizer("x")["input_ids"] == before  # the copy in the folder alone appends the end of the text
    T5ForConditionalGeneration.from_pretrained(folder).float().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied} | changes))
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return T5ForConditionalGeneration.from_pretrained(folder)(SOURCE, decoder_input_ids=TARGET).logits.float()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wide", [WIDE, replace(WIDE, num_heads=4, d_ff=63), SMALL])
@pytest.mark.slow
def test_a_widened_t5_computes_the_same(tokenizer: Any, tmp_path: Path, wide: T5Shape, tied: bool) -> None:
    narrow = source(tmp_path / "narrow", tokenizer, tied)
    result = up.widen_checkpoint(narrow, tmp_path / "wide", wide)
    before, after = logits(narrow), logits(tmp_path / "wide")
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert {k: config[k] for k in vars(wide)} == vars(wide)
    assert config["layer_norm_epsilon"] == pytest.approx(1e-6 * SMALL.d_model / wide.d_model)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "wide")
    assert result.parameters == model.num_parameters()


def test_unreachable_sizes_raise(tokenizer: Any, tmp_path: Path) -> None:
    narrow = source(tmp_path / "narrow", tokenizer, False)
    for wide, says in (
        (replace(WIDE, d_ff=16), "d_ff 16 is less"),
        (replace(WIDE, d_kv=32), "size of a head stays"),
        (replace(WIDE, num_heads=3), "fewer than twice"),
        (WideShape(96, 160, 5, 12, 3), "t5-large"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            up.widen_checkpoint(narrow, tmp_path / "wide", wide)
    assert not (tmp_path / "wide").exists()
    llama = {
        "model_type": "llama",
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
    }
    (narrow / "config.json").write_text(json.dumps(llama))
    with pytest.raises(InvalidRequest, match="size of a T5"):
        up.widen_checkpoint(narrow, tmp_path / "wide", WIDE)


def test_presets_have_the_size_they_are_named_after() -> None:
    small = {"model_type": "t5", "vocab_size": 4096, "d_model": 64, "d_ff": 128, "num_heads": 2, "num_layers": 4}
    config = widen_seq2seq.checked(small | {"feed_forward_proj": "gated-gelu"})
    for name, billions in (("t5-base", 0.2), ("t5-large", 0.73)):
        shape = up.like(name, 32, "t5")
        assert isinstance(shape, T5Shape)
        assert widen_seq2seq.expected_parameters(config, shape) / 1e9 == pytest.approx(billions, rel=0.03)


def test_added_heads_cancel_among_those_that_share_a_column() -> None:
    for heads, wide in ((2, 2), (2, 5), (3, 8)):
        for real in (True, False):
            if not real and wide < 2 * heads:
                with pytest.raises(ValueError, match="cannot become"):
                    head_groups(heads, wide, real)
                continue
            units, columns = head_groups(heads, wide, real)
            assert len(units.sources) == len(columns) == wide
            total: dict[tuple[int, int], float] = {}
            for unit, factor, column in zip(units.sources, units.factors, columns, strict=True):
                total[unit, column] = total.get((unit, column), 0.0) + factor
            assert all(value == (1.0 if unit >= 0 else 0.0) for (unit, _), value in total.items())
            assert {(j, j) for j in range(heads)} <= set(total) or not real
