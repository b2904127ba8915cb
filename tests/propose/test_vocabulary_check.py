"""A draft model must have the target's tokens, whatever the formats of both checkpoints."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.real import real_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams, zoo
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_config, load_tokenizer, open_weights, resolve, vocabulary_size
from foretoken.propose.draft_model import check_vocabulary
from foretoken.quantize.run import quantize_checkpoint

FORMATS = ("folder", "quantized folder", "GGUF file", "folder of a GGUF file")


def swapped(folder: Path, out: Path) -> Path:
    """A copy of a checkpoint whose tokenizer has two tokens swapped."""
    shutil.copytree(folder, out)
    data = json.loads((out / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    a, b = list(vocab)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (out / "tokenizer.json").write_text(json.dumps(data))
    return out


def in_format(source: Path, kind: str, out: Path) -> Path:
    if kind == "folder":
        return source
    if kind == "quantized folder":
        quantize_checkpoint(source, out, "int8")
        return out
    out.mkdir()
    quantize_checkpoint(source, out / "model.gguf", "Q8_0")
    return out if kind.startswith("folder") else out / "model.gguf"


@pytest.fixture(scope="module")
def checkpoints(tiny_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """The target, a draft with its tokens and one with others, in all formats."""
    made = tmp_path_factory.mktemp("formats")
    sources = {"target": tiny_pair.target, "draft": tiny_pair.draft, "other": swapped(tiny_pair.draft, made / "other")}
    return {
        name: {kind: in_format(source, kind, made / f"{name} {kind}") for kind in FORMATS}
        for name, source in sources.items()
    }


@pytest.mark.parametrize("draft", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_vocabularies_of_all_formats_are_compared(target: str, draft: str, checkpoints: Any) -> None:
    path = resolve(checkpoints["target"][target])
    tokenizer, size = load_tokenizer(path), vocabulary_size(path) or 0
    check_vocabulary(tokenizer, size, resolve(checkpoints["draft"][draft]))
    with pytest.raises(InvalidRequest, match=r"at 2 of .* token ids; .* or use the method 'vocabulary'"):
        check_vocabulary(tokenizer, size, resolve(checkpoints["other"][draft]))


CONFIGS: dict[str, Any] = {
    "the default": {},
    "draft_model": {"method": "draft_model"},
    "parallel drafting": {"method": "draft_model", "parallel_drafting": False},
    "auto": {"method": "auto"},
    "mixture": lambda draft: {"method": "mixture", "members": [{"method": "draft_model", "model": draft}]},
    "remote": lambda draft: {
        "method": "remote",
        "transport": "thread",
        "member": {"method": "draft_model", "model": draft},
    },
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("draft", ["folder", "GGUF file"])
def test_methods_that_load_a_draft_refuse_other_tokens(config: str, draft: str, checkpoints: Any) -> None:
    def opened(path: Path) -> LLM:
        made = CONFIGS[config]
        options = {"speculative_config": made(str(path))} if callable(made) else {"speculative_config": made}
        return LLM(checkpoints["target"]["folder"], None if callable(made) else path, dtype="float32", **options)

    with pytest.raises(InvalidRequest, match=r"vocabulary mismatch: .* or use the method 'vocabulary'"):
        opened(checkpoints["other"][draft])
    opened(checkpoints["draft"][draft]).close()


@pytest.mark.parametrize("more", [{"adapt": True}, {"methods": ["METHOD"]}])
def test_further_drafts_are_compared(more: dict[str, Any], checkpoints: Any) -> None:
    other = checkpoints["other"]["GGUF file"]
    if "methods" in more:
        more, other = {"methods": [{"method": "draft_model", "model": str(other)}]}, None
    with pytest.raises(InvalidRequest, match="vocabulary mismatch"):
        LLM(checkpoints["target"]["folder"], other, dtype="float32", **more)


def words(tokens: list[str], size: int, out: Path) -> Path:
    """A folder with a tokenizer of these words, and the size of an embedding."""
    ids = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(WordLevel(ids, unk_token=tokens[0]))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=tokens[0]).save_pretrained(out)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    return out


def test_added_and_padding_tokens(tmp_path: Path) -> None:
    """Each token of the target has its id in the draft, or is unknown to it and has a row in its embedding."""
    target = load_tokenizer(words(["<unk>", "a", "b", "<added>"], 8, tmp_path / "target"))
    for i, (tokens, size, fits) in enumerate(
        [
            (["<unk>", "a", "b", "<added>"], 4, True),
            (["<unk>", "a", "b", "<added>", "<more>"], 16, True),
            (["<unk>", "a", "b"], 8, True),
            (["<unk>", "a", "b"], 3, False),
            (["<unk>", "a", "b", "<renamed>"], 8, False),
            (["<unk>", "b", "a", "<added>"], 8, False),
            (["<unk>", "a", "<added>", "b"], 8, False),
        ]
    ):
        draft = words(tokens, size, tmp_path / str(i))
        if fits:
            check_vocabulary(target, 8, draft)
        else:
            with pytest.raises(InvalidRequest, match="vocabulary mismatch"):
                check_vocabulary(target, 8, draft)
    short = words(["<unk>", "a", "b"], 3, tmp_path / "short")
    check_vocabulary(target, 3, short)  # the target computes no token beyond these
    (short / "tokenizer.json").unlink()
    (short / "tokenizer_config.json").unlink()
    check_vocabulary(target, 3, short)  # nothing to compare but the sizes
    with pytest.raises(InvalidRequest, match="no token"):
        check_vocabulary(target, 8, short)


PROMPTS = ["The three largest cities of France are", "def add(a, b):\n    return", "1, 2, 3, 4,"]


@pytest.mark.real
@pytest.mark.parametrize(
    "target, draft", [("smollm2", "bundled"), ("bundled", "smollm2"), ("smollm2", "gemma3"), ("gemma3", "smollm2")]
)
@pytest.mark.slow
def test_real_pairs_need_the_method_vocabulary(target: str, draft: str) -> None:
    paths = [zoo.path("draft") if name == "bundled" else real_model(name) for name in (target, draft)]
    with pytest.raises(InvalidRequest, match="use the method 'vocabulary'"):
        LLM(*paths)
    llm = LLM(*paths, speculative_config={"method": "vocabulary", "num_speculative_tokens": 4})
    for temperature in (0, 1):  # "slem" drafts text, "tli" samples common tokens; neither needs an unknown token
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=4)
        plain = llm.generate(PROMPTS, replace(params, speculative_tokens=0))
        outputs = llm.generate(PROMPTS, params)
        assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
        assert sum(each.stats.accepted for each in outputs) > 0


def in_vocabulary_of_7b(source: Path, out: Path) -> Path:
    """Writes SmolLM2 with the tokenizer of the 7 B file: tokens of the same text have the same rows.

    Others have the embedding of their first token in SmolLM2, and half of its logit.
    """
    whole = out.with_suffix(".gguf")
    shutil.copyfile(real_model("qwen-7b-header"), whole)
    os.truncate(whole, 5 * 2**30)  # sparse: its header names tensors up to there
    tokenizer, small = load_tokenizer(whole), load_tokenizer(source)
    weights, known = open_weights(source), small.get_vocab()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    rows = torch.tensor([(ids or [0])[0] for ids in small(texts, add_special_tokens=False)["input_ids"]])
    scale = torch.full((len(rows), 1), 0.5, dtype=torch.bfloat16)
    for piece, token in tokenizer.get_vocab().items():
        if piece in known:
            rows[token], scale[token] = known[piece], 1.0
    embedding = weights["model.embed_tokens.weight"].bfloat16()[rows]
    tensors = {name: weights[name].bfloat16() for name in weights if "embed_tokens" not in name}
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding * scale}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    sizes = {"vocab_size": len(rows), "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(load_config(source) | sizes))
    return out


@pytest.mark.real
def test_a_vocabulary_of_152_000_tokens_is_drafted_from_another(tmp_path: Path) -> None:
    """Tokens per step: T=0 3.4 by text, 3.9 by shared tokens; T=1 2.6; of the same vocabulary 4.9."""
    small = real_model("smollm2")
    large = in_vocabulary_of_7b(small, tmp_path / "large")
    for target, draft in ((large, small), (small, large)):
        llm = LLM(target, draft, speculative_config={"method": "vocabulary", "num_speculative_tokens": 4})
        for temperature in (0, 1):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=4)
            plain = llm.generate(PROMPTS, replace(params, speculative_tokens=0))
            outputs = llm.generate(PROMPTS, params)
            assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
            stats = [each.stats for each in outputs]
            assert sum(each.tokens for each in stats) > 1.5 * sum(each.steps for each in stats)
