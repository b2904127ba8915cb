"""Published drafters of a model: found by its names, in the hub's cache, and of every form loaded."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.gguf_files import finish
from tests.models.heads import blocks, tiny
from tests.models.heads.assistant_files import saved_assistant
from tests.models.heads.mtp_files import MTP_FAMILIES, MtpReference
from tests.real import real_model

from foretoken import LLM, SamplingParams, zoo
from foretoken.core.artifacts import heads_method
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_config
from foretoken.models.heads.block import read_block
from foretoken.models.heads.dialects import write_block, write_eagle
from foretoken.models.heads.eagle import read_eagle
from foretoken.models.heads.published import checkpoint_facts, default_drafters, names_of, published_drafters
from foretoken.zoo import FORMS

pytestmark = pytest.mark.slow

TARGET = "Qwen3-8B"  # the folder of a tiny model


@pytest.fixture
def target(tiny_pair: Any, tmp_path: Path) -> Path:
    """A tiny model in a folder with the name of a published one."""
    return tiny.linked(tiny_pair.target, tmp_path / TARGET)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Returns the folder of a repository in an empty hub cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def folder(name: str) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("c0ffee")
        (repository / "snapshots" / "c0ffee").mkdir(parents=True)
        return repository / "snapshots" / "c0ffee"

    return folder


def found(model: str | Path) -> dict[str, str]:
    return {drafter.row.name: drafter.place for drafter in published_drafters(model)}


def test_drafters_in_the_cache_are_found_without_a_download(target: Path, cache: Any) -> None:
    names = "RedHatAI/Qwen3-8B-speculator.eagle3", "AngelSlim/Qwen3-8B_eagle3", "z-lab/Qwen3-8B-DFlash-b16"
    assert {found(target)[name] for name in names} == {"not here"}
    tiny.save(cache(names[0]), *tiny.eagle3())
    pickled = cache(names[1])
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    places = found(target)
    assert [places[name] for name in names] == ["in the hub's cache", "not here", "not here"]
    assert found("Qwen/Qwen3-8B") == places == found("Qwen/Qwen3-8B:Q4_K_M")


def test_a_folder_has_the_names_of_its_repository_and_its_base_model(tiny_pair: Any, cache: Any) -> None:
    folder = cache("someone/my-tune")
    config = json.loads((tiny_pair.target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "/data/out"}))
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model:\n- Qwen/Qwen3-4B\n---\nText\n")
    assert names_of(folder) == ["someone/my-tune", "/data/out", "Qwen/Qwen3-4B"]
    assert "deepseek-ai/dspark_qwen3_4b_block7" in found("someone/my-tune")


def test_a_gguf_file_has_the_names_of_its_metadata(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("My Tune")
    writer.add_base_model_count(1)
    writer.add_base_model_repo_url(0, "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct")
    finish(writer)
    assert names_of(file) == ["My Tune", "m", "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct"]
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in found(file)


def test_layers_in_the_checkpoint_are_found_there(tmp_path: Path, tiny_pair: Any) -> None:
    folder = tmp_path / "Qwen3-Next-80B-A3B-Instruct"
    MtpReference(MTP_FAMILIES["qwen3-next"]).save(folder)
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert found(folder)[name] == "in the checkpoint"
    without = tmp_path / "without" / folder.name
    without.parent.mkdir()
    without.symlink_to(tiny_pair.target)
    assert found(name)[name] == "not here"


def _eagle(dialect: str, **keys: Any) -> Callable[..., None]:
    def write(folder: Path, vocab: int, draft: Path) -> None:
        head = read_eagle(tiny.save(folder / "own", *tiny.eagle3(vocab=vocab, **keys)))
        tiny.save(folder, *write_eagle(head, dialect, head.taps))

    return write


def _block(method: str, dialect: str = "original") -> Callable[..., None]:
    def write(folder: Path, vocab: int, draft: Path) -> None:
        head = read_block(tiny.save(folder / "own", *getattr(blocks, method)(vocab=vocab)))
        tiny.save(folder, *write_block(head, dialect, torch.randn(vocab, 64)))

    return write


def _draft(**keys: Any) -> Callable[..., None]:
    def write(folder: Path, vocab: int, draft: Path) -> None:
        for file in draft.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((draft / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))

    return write


LAYOUTS = {
    "deepseek-ai/eagle3_qwen3_8b_ttt7": ("eagle3", _eagle("sglang")),
    "Tengyunw/qwen3_8b_eagle3": ("eagle3", _eagle("vllm")),
    "RedHatAI/Qwen3-8B-speculator.eagle3": ("eagle3", _eagle("speculators")),
    "RedHatAI/Qwen3-8B-speculator.peagle": ("p-eagle", _eagle("speculators", mask=9)),
    "z-lab/Qwen3-8B-DFlash-b16": ("dflash", _block("dflash")),
    "JetSpec/jetspec-qwen3-8b": ("jetspec", _block("jetspec")),
    "deepseek-ai/dspark_qwen3_8b_block7": ("dspark", _block("dspark")),
    "amd/PARD-Qwen3-0.6B": ("pard", _draft(pard_token=7)),
    "Qwen/Qwen3-0.6B": ("draft_model", _draft()),
}
"""By hub name the form of a drafter, and the writer of a tiny random one in its layout."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_auto_loads_a_drafter_of_every_layout(name: str, target: Path, tiny_pair: Any, cache: Any) -> None:
    form, write = LAYOUTS[name]
    folder = cache(name)
    write(folder, load_config(target)["vocab_size"], tiny_pair.draft)
    assert (heads_method(load_config(folder)) or "draft_model") == FORMS[form]
    llm = LLM(target, "auto", dtype="float32")
    assert llm.drafter == f"drafter: {name} ({form}, in the hub's cache) of Qwen/Qwen3-8B"
    assert llm.methods == ("auto", FORMS[form]) and llm.draft_model == str(folder)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, speculative_tokens=3)
    plain = LLM(target, dtype="float32", speculative_config={"method": "none"}).generate("def", params)[0].outputs[0]
    drafted = llm.generate("def", params)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids and drafted.stats.drafted > 0


def test_every_form_of_the_table_has_a_layout_here(tmp_path: Path, tiny_pair: Any) -> None:
    saved_assistant(tmp_path, clusters=False)
    assert heads_method(load_config(tmp_path)) == "assistant"
    elsewhere = {"assistant", "mtp", "medusa", "blockwise"}  # loaded above, in test_assistant, and from the zoo
    assert {form for form, _ in LAYOUTS.values()} | elsewhere == set(FORMS)


def test_auto_prefers_the_form_with_the_highest_acceptance(target: Path, tiny_pair: Any, cache: Any) -> None:
    vocab = load_config(target)["vocab_size"]
    for name in ("Qwen/Qwen3-0.6B", "z-lab/Qwen3-8B-DFlash-b16", "Tengyunw/qwen3_8b_eagle3"):
        LAYOUTS[name][1](cache(name), vocab, tiny_pair.draft)
    assert "Tengyunw/qwen3_8b_eagle3" in LLM(target, "auto", dtype="float32").drafter
    chosen = LLM(target, speculative_config={"model": "auto", "method": "dflash"}, dtype="float32")
    assert "z-lab/Qwen3-8B-DFlash-b16" in chosen.drafter and chosen.methods == ("dflash",)


def test_auto_without_a_drafter_lists_them(target: Path, cache: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(target, "auto", dtype="float32")
    assert llm.drafter == "drafter: none (method auto)" and llm.methods == ("auto",)
    assert "known are deepseek-ai/dspark_qwen3_8b_block7, " in caplog.text
    assert "hf download deepseek-ai/dspark_qwen3_8b_block7" in caplog.text
    with pytest.raises(InvalidRequest, match="'eagle3' needs heads"):
        LLM(target, speculative_config={"model": "auto", "method": "eagle3"}, dtype="float32")


def test_auto_of_an_unknown_model_drafts_by_copying(tiny_pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert LLM(tiny_pair.target, "auto", dtype="float32").methods == ("auto",)
    assert "none is known" in caplog.text


def test_layers_of_the_checkpoint_draft_by_auto(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "Qwen3-Next-80B-A3B-Instruct"
    MtpReference(MTP_FAMILIES["qwen3-next"]).save(folder)
    tokenizer.save_pretrained(folder)
    llm = LLM(folder, "auto", dtype="float32")
    assert llm.methods == ("auto", "mtp") and "in the checkpoint" in llm.drafter


HEAD = "smollm2-135m-eagle3"


@pytest.fixture
def recognized(tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny target in the place of SmolLM2, whose bundled head is a tiny one. Returns the target's folder."""
    facts = {"names": [], **checkpoint_facts(tiny_pair.target)}
    folder = tiny.save(tmp_path / "zoo" / HEAD, *tiny.eagle3(vocab=facts["sizes"]["vocab_size"]))
    (folder / "target.json").write_text(json.dumps(facts))
    (folder / "zoo.json").write_text(json.dumps({"name": HEAD, "role": "smollm2-eagle3"}))
    monkeypatch.setattr(zoo, "_HERE", tmp_path / "zoo")
    return Path(tiny_pair.target)


def changed(target: Path, folder: Path, part: str, noise: float) -> Path:
    """Writes a fine-tune: ``target`` with noise on the tensors whose names contain ``part``."""
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    g = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if part in name]:
        size = tensors[name].std() or 1.0
        tensors[name] += noise * size * torch.randn(tensors[name].shape, generator=g)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_bundled_head_drafts_for_its_target_by_default(recognized: Path) -> None:
    llm = LLM(recognized, dtype="float32")
    assert llm.methods == ("auto", "eagle3") and llm.draft_model is None
    assert llm.drafter == f"drafter: {HEAD} (eagle3, bundled) of HuggingFaceTB/SmolLM2-135M-Instruct"
    fixed = LLM(recognized, dtype="float32", speculative_config={"num_speculative_tokens": 3})
    assert fixed.methods == ("eagle3",) and fixed.drafter == llm.drafter
    for config in ({"method": "none"}, {"method": "auto"}, {"method": "ngram"}):
        named = LLM(recognized, dtype="float32", speculative_config=config)
        assert named.methods == (config["method"],) and named.drafter.startswith("drafter: none")


@pytest.mark.parametrize("part, noise", [("layernorm", 0.05), ("model.norm", 0.05), ("v_proj", 0.05)])
def test_a_fine_tune_is_no_target_of_a_bundled_head_unless_it_is_named(part, noise, recognized, tmp_path):
    folder = changed(recognized, tmp_path / "SmolLM2-135M-Instruct", part, noise)
    llm = LLM(folder, dtype="float32")
    assert llm.methods == ("auto",) and llm.drafter == "drafter: none (method auto)"
    assert HEAD in LLM(folder, "auto", dtype="float32").drafter
    assert LLM(folder, HEAD, dtype="float32").methods == ("auto", "eagle3")


def test_rounded_copies_of_a_target_are_recognized(recognized: Path, tmp_path: Path) -> None:
    copied = changed(recognized, tmp_path / "copy", "v_proj", 0.002)  # as int8 rounds
    assert [default.method for default in default_drafters(copied)] == ["eagle3"]


def test_heads_that_a_target_ships_come_first(recognized: Path, tmp_path: Path) -> None:
    folder = changed(recognized, tmp_path / "copy", "v_proj", 0.0)
    vocab = load_config(folder)["vocab_size"]
    tiny.save(folder / "heads" / "eagle3", *tiny.eagle3(vocab=vocab))
    assert LLM(folder, dtype="float32").drafter == "drafter: eagle3 in heads/eagle3 of the model's folder"


@pytest.mark.real
def test_a_bundled_head_recognizes_the_real_model() -> None:
    (default,) = default_drafters(real_model("smollm2"))
    assert default.model == str(zoo.path(HEAD)) and "bundled" in default.line
