import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from foretoken import zoo
from foretoken.core.errors import InvalidRequest, ModelLoadError, TrainingError, WriteError
from foretoken.models.formats import shards
from foretoken.train.shapes import LlamaShape
from foretoken.train.target import new_model
from foretoken.train.widen import checkpoint as up
from foretoken.train.widen import llama
from foretoken.train.widen.llama import WideShape
from foretoken.train.widen.units import copies, query_heads, rotation

WIDE = WideShape(96, 160, 5, 12, 3)


def source(folder: Path, tokenizer: Any, shape: LlamaShape, dtype: torch.dtype = torch.float32) -> Path:
    model = new_model(shape, tokenizer, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5) if "norm" in name else parameter.mul_(4)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def small(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("small") / "m", tokenizer, LlamaShape(32, 48, 2, 4, 2, 16, 128))


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder)(ids).logits.float()


IDS = torch.arange(2, 66).view(2, 32)


@pytest.mark.parametrize(
    "wide",
    [
        WIDE,
        replace(
            WIDE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),  # rotated only
        replace(WIDE, hidden_size=120, intermediate_size=63, num_attention_heads=15),  # odd: halves and triples
    ],
)
def test_a_widened_model_computes_the_same(small: Path, tmp_path: Path, wide: WideShape) -> None:
    result = up.widen_checkpoint(small, tmp_path / "wide", wide)
    before, after = logits(small, IDS), logits(tmp_path / "wide", IDS)
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert {k: config[k] for k in vars(wide)} == vars(wide)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "wide")
    assert result.parameters == model.num_parameters() == llama.expected_parameters(config, wide)


def test_bfloat16_stays_close(tokenizer: Any, tmp_path: Path) -> None:
    narrow = source(tmp_path / "narrow", tokenizer, LlamaShape(64, 96, 2, 4, 2, 16, 128), torch.bfloat16)
    up.widen_checkpoint(narrow, tmp_path / "wide", WideShape(256, 320, 4, 16, 4))
    p, q = logits(narrow, IDS).softmax(-1), logits(tmp_path / "wide", IDS).softmax(-1)
    assert (p - q).abs().sum(-1).mean() / 2 < 0.05


def test_tokens_positions_and_tokenizer_are_kept(small: Path, tmp_path: Path) -> None:
    up.widen_checkpoint(small, tmp_path / "wide", WIDE)
    before, after = (json.loads((p / "config.json").read_text()) for p in (small, tmp_path / "wide"))
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "max_position_embeddings", "head_dim")
    for key in kept:
        assert before[key] == after[key]
    assert after["rms_norm_eps"] == pytest.approx(before["rms_norm_eps"] * 32 / 96)
    assert after["tie_word_embeddings"] is False
    assert after["architectures"] == ["LlamaForCausalLM"]
    vocabularies = [AutoTokenizer.from_pretrained(p).get_vocab() for p in (small, tmp_path / "wide")]
    assert vocabularies[0] == vocabularies[1]


def test_shards_load_as_one_model(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.ShardWriter.__init__, "__defaults__", (200_000,))
    up.widen_checkpoint(small, tmp_path / "wide", WIDE)
    assert len(list((tmp_path / "wide").glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(logits(small, IDS).argmax(-1), logits(tmp_path / "wide", IDS).argmax(-1))
    up.widen_checkpoint(tmp_path / "wide", tmp_path / "wider", replace(WIDE, hidden_size=144))  # shards are read, too
    assert torch.equal(logits(small, IDS).argmax(-1), logits(tmp_path / "wider", IDS).argmax(-1))


def test_the_same_seed_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    sums = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        up.widen_checkpoint(small, tmp_path / name, WIDE, seed)
        sums.append(up.weights_sha256(tmp_path / name))
    assert sums[0] == sums[1] != sums[2]


@pytest.mark.parametrize(
    ("wide", "says"),
    [
        (replace(WIDE, hidden_size=16), "hidden_size 16 is less"),
        (replace(WIDE, num_hidden_layers=1), "can only grow"),
        (replace(WIDE, num_attention_heads=13), "do not divide"),
        (replace(WIDE, num_attention_heads=15), "not a multiple of 15"),
        (replace(WIDE, num_attention_heads=4, num_key_value_heads=4), "fewer than the source's 2"),
    ],
)
def test_sizes_that_cannot_work_are_refused(small: Path, tmp_path: Path, wide: WideShape, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        up.widen_checkpoint(small, tmp_path / "wide", wide)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt2"}, {"attention_bias": True}, {"quantization_config": {"bits": 4}}]
)
def test_other_architectures_are_refused(small: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    config = json.loads((small / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="cannot widen"):
        up.read_config(tmp_path)


def test_missing_or_damaged_sources_are_named(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        up.widen_checkpoint(tmp_path / "nothing", tmp_path / "wide", WIDE)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_bytes((small / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match="safetensors"):
        up.widen_checkpoint(tmp_path / "source", tmp_path / "wide", WIDE)
    with pytest.raises(InvalidRequest, match=r"known: 0\.7b"):
        up.like("2b")


def test_a_full_disk_leaves_nothing(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(WriteError, match="No space left"):
        up.widen_checkpoint(small, tmp_path / "wide", WIDE)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(TrainingError, match="disk has less free"):
        up.widen_checkpoint(small, tmp_path / "wide", WIDE)
    assert not list(tmp_path.iterdir())


def test_presets_have_the_size_they_are_named_after() -> None:
    config = {"head_dim": 64, "vocab_size": 4096}
    for name, billions in (("0.7b", 0.74), ("1b", 1.0), ("3b", 2.8), ("7b", 7.0)):
        assert llama.expected_parameters(config, up.like(name)) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name, billions", [("0.7b", 0.91), ("1b", 1.18), ("3b", 3.3), ("7b", 7.4)])
def test_presets_fit_a_source_with_more_layers(name: str, billions: float) -> None:
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64}
    config = {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, **sizes}
    shape = up.fitted(name, config)
    llama.check(config, shape)
    assert llama.expected_parameters(config, shape) / 1e9 == pytest.approx(billions, rel=0.03)
    grouped = config | {"num_attention_heads": 9, "num_key_value_heads": 1, "num_hidden_layers": 2}
    llama.check(grouped, up.fitted(name, grouped))


def test_presets_stay_where_they_fit() -> None:
    config = up.read_config(zoo.path("target"))
    assert [up.fitted(name, config) for name in llama.PRESETS] == [up.like(name) for name in llama.PRESETS]


def test_filler_units_cancel_within_their_group() -> None:
    for real, wide in ((3, 3), (3, 6), (3, 7), (0, 4), (0, 5)):
        units = copies(real, wide)
        total: dict[int, float] = {}
        for unit, factor in zip(units.sources, units.factors, strict=True):
            total[unit] = total.get(unit, 0.0) + factor
        assert all(total[unit] == (1.0 if unit >= 0 else 0.0) for unit in total)
        assert len(units.sources) == wide
        assert all(math.frexp(f)[0] in (0.5, -0.5) for f in units.factors)  # powers of two
    heads = query_heads(6, 3, 16, 4)
    assert [s for s in heads.sources[:12] if s >= 0] == [0, 1, 2, 3, 4, 5]
    assert heads.sources[4:6] == (2, 3)  # the second group's own


def test_the_rotation_keeps_lengths() -> None:
    q = rotation(8, 20, seed=0)
    assert torch.allclose(q @ q.T, torch.eye(8, dtype=torch.float64), atol=1e-12)
