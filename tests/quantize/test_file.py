"""GGUF files that are written: the same model, tokenizer and types as llama.cpp's own tools make."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType as K
from safetensors.torch import load_file, save_file
from tests.conftest import TEXT
from tests.models.gguf_files import FAMILIES, tiny_checkpoint, write_both
from tests.models.test_gguf_tokenizer import byte_level, check_equal
from tests.models.tiny import only_runner
from tokenizers import processors
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foretoken import zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_config, load_generation_settings, load_tokenizer
from foretoken.models.formats.gguf.blocks import FLOATS
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.settings import MIXTURES, stored_rows, tensor_type
from foretoken.models.formats.gguf.tokenizer import PRE_TOKENIZERS
from foretoken.models.formats.gguf.weights import GGUFWeights
from foretoken.models.loading import load_model
from foretoken.quantize import quantize_checkpoint
from foretoken.train.data import Corpus, train_tokenizer

pytestmark = pytest.mark.slow

VOCABULARY = 340
IDS = [3 + (17 * at) % 300 for at in range(40)]
# Mistral's and Qwen 2's sliding windows have no form in llama.cpp.
SETTINGS: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}, "phi3": {"sliding_window": None}}


def logits(path: Path) -> Tensor:
    model = load_model(path, dtype="float32")
    return model.score([model.open(IDS)], [Draft.chain([5, 6])])[0].logits


WITH_EXPERTS = {"qwen3moe", "qwen2moe", "mixtral", "olmoe", "granitemoe", "gpt-oss"}  # read, and not yet written


@cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """One of the bundled models' kind: with their vocabulary, most of the time would go into two matrices."""
    tokenizer = train_tokenizer(Corpus("test", TEXT * 3, TEXT), VOCABULARY)
    tokenizer.chat_template = (zoo.path("draft") / "chat_template.jinja").read_text(encoding="utf-8")
    assert len(tokenizer) == VOCABULARY
    return tokenizer


def checkpoint(architecture: str, folder: Path, **settings: Any) -> Path:
    """Saves a tiny random model that has more rows than its tokenizer has tokens."""
    more = {"vocab_size": VOCABULARY + 4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0}
    tiny_checkpoint(architecture, **{**more, **SETTINGS.get(architecture, {}), **settings}).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", sorted(WITH_EXPERTS))
def test_models_with_experts_are_not_written(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no name|are not written as GGUF"):
        quantize_checkpoint(checkpoint(architecture, tmp_path / "source"), tmp_path / "model.gguf", "F32")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("architecture", sorted(set(FAMILIES) - WITH_EXPERTS))
def test_every_architecture_is_the_same_model(architecture: str, tmp_path: Path) -> None:
    """F32 files hold all numbers, and quantized ones what the gguf package reads from them."""
    source, file = checkpoint(architecture, tmp_path / "source"), tmp_path / "model.gguf"
    quantize_checkpoint(source, file, "F32")
    with only_runner("torch"):
        expected, ours = logits(source), logits(file)
        if architecture == "llama":  # its rotary factors are rounded to float32
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.std()))
        else:
            assert torch.equal(ours, expected)
    quantize_checkpoint(source, tmp_path / "small.gguf", "Q4_K_M")
    own, stored = GGUFWeights(tmp_path / "small.gguf"), load_file(source / "model.safetensors")
    if load_config(source).get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    assert set(own) == set(stored)
    for name, tensor in stored.items():
        assert (own[name] - tensor).square().mean() <= 0.006 * tensor.square().mean(), name
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    header = Header.read(tmp_path / "small.gguf")
    assert {name: t.kind for name, t in header.tensors.items()} == {n: t.tensor_type for n, t in read.items()}
    values = gguf.dequantize(read["blk.1.ffn_down.weight"].data, read["blk.1.ffn_down.weight"].tensor_type)
    assert torch.equal(torch.from_numpy(values), own["model.layers.1.mlp.down_proj.weight"])


def test_queries_and_keys_are_interleaved_as_llama_cpp_s_converter_does(tmp_path: Path) -> None:
    from tests.models.gguf_files import interleaved

    from foretoken.models.families.architecture import Architecture
    from foretoken.models.formats.gguf.families import FAMILIES as KNOWN

    module = tiny_checkpoint("llama")
    a = Architecture.of(module.config.to_dict())
    for name, heads in (("q_proj", a.heads), ("k_proj", a.kv_heads)):
        tensor = getattr(module.model.layers[0].self_attn, name).weight.detach()
        rows = stored_rows(KNOWN["llama"], a, f"model.layers.0.self_attn.{name}.weight", tensor)
        assert torch.equal(rows, torch.from_numpy(interleaved(tensor.numpy(), heads)))


class Llama(NamedTuple):
    folder: Path
    logits: Tensor


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return Llama(folder, logits(folder))


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_scheme_is_near_the_model(mixture: str, llama: Llama, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    result = quantize_checkpoint(llama.folder, file, mixture)
    assert result.bytes_after == file.stat().st_size
    exact, near = llama.logits, 0.8 if mixture.startswith("Q3") else 0.45
    assert (logits(file) - exact).abs().max() < near * exact.abs().max()
    assert Header.read(file).metadata["general.file_type"] == MIXTURES[mixture].file_type


# What llama-quantize chose for the tensors of a Llama with rows of 256 (of 384 where a fallback is named).
CHOSEN = {
    ("Q4_K_M", "output.weight", 256): K.Q6_K,
    ("Q4_K_M", "token_embd.weight", 256): K.Q4_K,
    ("Q4_K_M", "blk.0.attn_v.weight", 256): K.Q6_K,
    ("Q4_K_M", "blk.1.attn_v.weight", 256): K.Q4_K,
    ("Q4_K_M", "blk.3.attn_v.weight", 256): K.Q6_K,
    ("Q4_K_M", "blk.2.ffn_down.weight", 256): K.Q4_K,
    ("Q4_K_M", "blk.7.ffn_down.weight", 256): K.Q6_K,
    ("Q4_K_M", "blk.0.attn_qkv.weight", 256): K.Q6_K,
    ("Q4_K_M", "blk.0.attn_q.weight", 384): K.Q5_0,
    ("Q4_K_M", "blk.0.attn_v.weight", 384): K.Q8_0,
    ("Q4_K_M", "output.weight", 384): K.Q8_0,
    ("Q4_K_S", "blk.0.ffn_down.weight", 256): K.Q5_K,
    ("Q4_K_S", "blk.4.attn_v.weight", 256): K.Q4_K,
    ("Q5_K_M", "blk.0.attn_q.weight", 384): K.Q5_1,
    ("Q3_K_M", "blk.1.attn_v.weight", 256): K.Q5_K,
    ("Q3_K_M", "blk.0.attn_output.weight", 256): K.Q4_K,
    ("Q3_K_L", "blk.0.ffn_down.weight", 256): K.Q5_K,
    ("Q4_0", "output.weight", 256): K.Q6_K,
    ("Q4_0", "output.weight", 384): K.Q8_0,
    ("Q8_0", "output.weight", 256): K.Q8_0,
    ("Q4_0", "blk.0.attn_q.weight", 40): K.F16,
    ("F16", "blk.0.attn_q.weight", 40): K.F16,
}


@pytest.mark.parametrize(("mixture", "name", "width"), CHOSEN)
def test_types_are_those_of_llama_quantize(mixture: str, name: str, width: int) -> None:
    assert tensor_type(mixture, name, (64, width), 8, tied=False) == CHOSEN[mixture, name, width]


def test_a_tied_embedding_gets_the_type_of_the_output() -> None:
    assert tensor_type("Q4_K_M", "token_embd.weight", (64, 256), 8, tied=True) == K.Q6_K
    assert tensor_type("Q4_K_M", "blk.0.attn_norm.weight", (256,), 8, tied=True) == K.F32


@pytest.mark.parametrize("pre", sorted({rule: name for name, rule in PRE_TOKENIZERS.items()}.values()))
def test_byte_level_tokenizers_come_back_equal(pre: str, tmp_path: Path) -> None:
    original = byte_level(pre).from_str(byte_level(pre).to_str())
    begin, end = (original.token_to_id(token) for token in ("<|begin|>", "<|end|>"))
    source = checkpoint("qwen2", tmp_path / "source", vocab_size=1520, eos_token_id=end)
    original.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1", special_tokens=[("<|begin|>", begin)]
    )
    full = PreTrainedTokenizerFast(tokenizer_object=original, bos_token="<|begin|>", eos_token="<|end|>")
    full.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    full.save_pretrained(source)
    quantize_checkpoint(source, tmp_path / "model.gguf", "F16")
    ours = load_tokenizer(tmp_path / "model.gguf")
    check_equal(ours, full, every=5)  # reading a file is compared on all of them
    assert ours.full.chat_template == full.chat_template
    assert (ours.bos_token_id, ours.eos_token_id) == (full.bos_token_id, full.eos_token_id)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers_come_back_equal(prefix: bool, tmp_path: Path) -> None:
    from tests.models.test_gguf_tokenizer import sentencepiece, written

    trained = sentencepiece(prefix)
    ids = range(trained.get_piece_size())
    kinds: list[int] = [gguf.TokenType.BYTE if trained.is_byte(i) else gguf.TokenType.NORMAL for i in ids]
    kinds[:3] = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    settings = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix}
    scores = [trained.get_score(i) for i in ids]
    first = written(
        tmp_path / "a.gguf", "llama", [trained.id_to_piece(i) for i in ids], kinds, scores=scores, **settings
    )
    original = load_tokenizer(first)
    source = checkpoint("qwen2", tmp_path / "source", vocab_size=1510)
    original.full.save_pretrained(source)
    quantize_checkpoint(source, tmp_path / "model.gguf", "F16")
    check_equal(load_tokenizer(tmp_path / "model.gguf"), original)


def test_the_bundled_target_comes_back_whole(tmp_path: Path) -> None:
    source = zoo.path("target")
    quantize_checkpoint(source, tmp_path / "model.gguf", "BF16")
    with only_runner("torch"):
        assert torch.equal(logits(tmp_path / "model.gguf"), logits(source))
    ours, original = load_tokenizer(tmp_path / "model.gguf"), load_tokenizer(source)
    check_equal(ours, original)
    assert ours.full.chat_template == original.full.chat_template
    ends = [settings.eos_token_id for settings in load_generation_settings(tmp_path / "model.gguf")]
    assert ends == [[0]]


@pytest.mark.parametrize("start", [0, 3])
def test_a_file_with_a_start_token_becomes_a_folder(start: int, tmp_path: Path) -> None:
    source = checkpoint("qwen2", tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "small.gguf", "F16")
    header = Header.read(tmp_path / "small.gguf")
    started = replace(header, metadata={**header.metadata, "tokenizer.ggml.bos_token_id": start})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Header, "read", staticmethod(lambda path: started))
        quantize_checkpoint(tmp_path / "small.gguf", tmp_path / "folder", "bfloat16")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["bos_token_id"] == start and config["eos_token_id"] == 0
    assert json.loads((tmp_path / "folder" / "generation_config.json").read_text())["bos_token_id"] == start


def test_ends_that_are_recognised_by_their_texts_need_no_name(tmp_path: Path) -> None:
    """A GGUF file names three at most."""
    source = checkpoint("qwen2", tmp_path / "source", vocab_size=VOCABULARY + 8)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    ends = ["<|im_end|>", "<|eot_id|>", "<|stop|>", "<|halt|>", "<|over|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ends})
    tokenizer.save_pretrained(source)
    ids = [0, *tokenizer.convert_tokens_to_ids(ends)]
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[:5]}))
    quantize_checkpoint(source, tmp_path / "model.gguf", "F16")
    (settings,) = load_generation_settings(tmp_path / "model.gguf")
    assert sorted(settings.eos_token_id) == sorted(ids[:5])
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(InvalidRequest, match="end with 6 tokens; a GGUF file names at most 3"):
        quantize_checkpoint(source, tmp_path / "second.gguf", "F16")


@pytest.mark.parametrize("architecture", ["olmoe", "qwen3moe"])
def test_a_file_with_stacks_of_experts_does_not_become_a_folder(architecture: str, tmp_path: Path) -> None:
    file, _ = write_both(tiny_checkpoint(architecture), architecture, tmp_path, K.F32)
    with pytest.raises(InvalidRequest, match="stacks of experts"):
        quantize_checkpoint(file, tmp_path / "folder", "bfloat16")


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen2"])
def test_a_file_becomes_a_folder_that_transformers_loads(architecture: str, tmp_path: Path) -> None:
    plain = {"original_max_position_embeddings": 8192, "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    plain |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = {"rope_parameters": plain} if architecture == "llama" else {}
    source = checkpoint(architecture, tmp_path / "source", **more)
    quantize_checkpoint(source, tmp_path / "small.gguf", "Q8_0")
    quantize_checkpoint(tmp_path / "small.gguf", tmp_path / "folder", "float32")
    with only_runner("torch"):
        expected = logits(tmp_path / "small.gguf")
        torch.testing.assert_close(logits(tmp_path / "folder"), expected, rtol=1e-4, atol=1e-4)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = module(torch.tensor([[*IDS, 5, 6]])).logits[0, -3:]
    torch.testing.assert_close(theirs, expected, rtol=1e-3, atol=1e-3)
    assert load_tokenizer(tmp_path / "folder").encode("def f(x):") == load_tokenizer(source).encode("def f(x):")


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("mistral", {"sliding_window": 8}, "windows"),
        ("gemma2", {"query_pre_attn_scalar": 60}, "scale"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1]}, "rope"),
        ("llama", {"mlp_bias": True}, "has no name"),
    ],
)
def test_settings_without_a_key_in_gguf_are_refused(architecture, settings, message, tmp_path):
    source = checkpoint(architecture, tmp_path / "source", **settings)
    with pytest.raises(InvalidRequest, match=message):
        quantize_checkpoint(source, tmp_path / "model.gguf", "Q4_0")
    assert not list(tmp_path.glob("*.gguf"))


def test_unknown_tokenizers_and_tensors_are_refused(tmp_path: Path) -> None:
    source = checkpoint("qwen2", tmp_path / "source", vocab_size=VOCABULARY)
    content = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(content.replace('"use_regex": true', '"use_regex": false'))
    with pytest.raises(InvalidRequest, match="splits text"):
        quantize_checkpoint(source, tmp_path / "model.gguf", "Q4_0")
    (source / "tokenizer.json").write_text(content)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.layers.0.more.weight": torch.ones(2, 2)}, source / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"more\.weight"):
        quantize_checkpoint(source, tmp_path / "model.gguf", "Q4_0")
    assert not (tmp_path / "model.gguf").exists()


def test_floats_stay_floats(tmp_path: Path) -> None:
    source = checkpoint("gemma3", tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "model.gguf", "BF16")
    kinds = {name: tensor.kind for name, tensor in Header.read(tmp_path / "model.gguf").tensors.items()}
    assert set(kinds.values()) == {K.F32, K.BF16} and kinds["blk.0.attn_norm.weight"] in FLOATS
