"""MTP layers as a proposer: no text depends on them, whatever is cached, preempted or batched."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.heads import blocks, tiny
from tests.models.heads.mtp_files import MTP_FAMILIES, MtpReference
from tests.models.plain import text

from foretoken import LLM, SamplingParams
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.footprint import state_tokens
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.models.heads.loading import load_mtp
from foretoken.models.heads.mtp import has_mtp, read_mtp
from foretoken.models.heads.mtp_net import MtpStack
from foretoken.models.heads.taps import TOKENS
from foretoken.models.loading import load_model
from foretoken.models.runners.pass_plan import Tapped
from foretoken.propose import hidden_states
from foretoken.propose.base import Proposer
from foretoken.propose.mtp import Mtp, MtpConfig
from foretoken.propose.union import Union

FAMILIES = ("qwen3.5", "deepseek-v3", "two layers")
LENGTH = 20


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = 2 if request.param == "two layers" else 1
    family = MTP_FAMILIES["glm4-moe" if layers == 2 else request.param]
    return MtpReference(family, layers).save(tmp_path_factory.mktemp("mtp"))


def opened(folder: Path) -> Model:
    return load_model(folder, "float32", "cpu", "native")


def mtp(target: Model, folder: Path, **config: Any) -> Mtp:
    loaded = load_mtp(target, None, None, folder, True, True)
    return Mtp(loaded.net, loaded.taps, MtpConfig(**config))


def run(
    engine: Engine, prompts: Sequence[list[int]], temperature: float = 0.0, length: int = LENGTH
) -> tuple[list[list[int]], int]:
    """Texts, and the number of draft tokens."""
    law, grade = SamplingLaw(temperature=temperature), Exactness.TRAJECTORY
    contexts = [Context(i, list(prompt), len(prompt), law, Streams(i), grade) for i, prompt in enumerate(prompts)]
    for context in contexts:
        engine.add(context, Length(length))
    drafted = 0
    while engine.busy:
        drafted += sum(len(step.draft) for step in engine.step())
    engine.check_integrity()
    return [c.tokens[len(p) :] for c, p in zip(contexts, prompts, strict=True)], drafted


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding(folder: Path) -> None:
    """Chains and trees, alone and in a batch of eight, greedy and sampled: any two of the three settings meet."""
    prompts = [text(length, length) for length in (1, 2, 3, 5, 40, 70, 130, 300)]
    configs: tuple[dict[str, Any], ...] = ({"tree": "chain"}, {"tree": "top_k", "top_k": 2}, {"tree": "sampled"})
    for temperature, batches in ((0.0, (1, 8, 1)), (1.0, (8, 1, 8))):
        plain, _ = run(Engine(opened(folder), Proposer(), Fixed(0), max_sequences=8), prompts, temperature)
        for config, batch in zip(configs, batches, strict=True):
            target = opened(folder)
            engine = Engine(target, mtp(target, folder, **config), Fixed(5), max_sequences=batch, prompt_rows=48)
            texts, drafted = run(engine, prompts, temperature)
            assert texts == plain and drafted > 0


@pytest.mark.slow
def test_preempted_sequences_go_on_as_they_would_have(folder: Path) -> None:
    prompts, length = [text(length, length) for length in (1, 3, 20, 40)], 70
    plain, _ = run(Engine(opened(folder), Proposer(), Fixed(0)), prompts, 1.0, length)
    target = opened(folder)
    proposer = mtp(target, folder, tree="sampled")
    engine = Engine(target, proposer, Fixed(5), capacity=320 + 3 * state_tokens(target, proposer))
    texts, drafted = run(engine, prompts, 1.0, length)
    assert texts == plain and drafted > 0 and engine.scheduler.usage.preemptions


@pytest.mark.slow
def test_after_a_prefix_cache_hit_drafts_are_the_same(folder: Path) -> None:
    """The second prompt continues the first; what is drafted for it equals what a fresh engine drafts."""
    target = opened(folder)
    if not target.enable_prefix_cache(2**24):
        pytest.skip("no compiled kernels here")
    proposer = mtp(target, folder)
    proposer.enable_prefix_cache(2**24)
    kept = Engine(target, proposer, Fixed(6))
    first = text(150, 1)
    second = [*first, *run(kept, [first])[0][0], *text(30, 2)]
    steps = [drafts(kept, second)]
    again = Context(8, second, len(second), SamplingLaw(), Streams(0))
    assert proposer.reusable_prefix_len(again) >= 126  # two pages, of several layers a row less
    proposer.forget(again)
    other = opened(folder)
    steps.append(drafts(Engine(other, mtp(other, folder), Fixed(6)), second))
    assert steps[0] == steps[1] and any(steps[0])


def drafts(engine: Engine, prompt: list[int]) -> list[tuple[int, ...]]:
    """The drafts of every step for one prompt."""
    engine.add(Context(7, list(prompt), len(prompt), SamplingLaw(temperature=0.0), Streams(0)), Length(LENGTH))
    found = []
    while engine.busy:
        found += [step.draft.ids for step in engine.step()]
    return found


@torch.no_grad()
def test_several_layers_draft_a_token_each(tmp_path: Path) -> None:
    """Layer k reads layer k - 1 at the token before; beyond the last layer, that one is chained."""
    reference = MtpReference(MTP_FAMILIES["glm4-moe"], 2)
    folder = reference.save(tmp_path)
    net = load_mtp(opened(folder), None, None, folder, True, True).net
    assert isinstance(net, MtpStack)
    tokens, drafted = text(12, 4), [30, 40, 50]
    hidden = reference(tokens[:-1]).hidden_states[-1][0]
    handle = net.open()
    logits = []
    for cut in (5, len(tokens)):  # the text comes in two parts
        at = len(handle.tokens) + 1
        net.extend(handle, tokens[at:cut], hidden[at - 1 : cut - 1])
        rows = net.catch_up([handle])
    logits.append(rows[0])
    for size in range(1, 4):
        logits += net.grow([handle], [Draft.chain(drafted[:size])])

    first, states, _ = reference.layer(0, tokens[1:], hidden)
    expected = [first[-1]]
    # Layer 1: token i + 2 with layer 0's output at i. The draft's first token reads layer 0's last output.
    second, own, _ = reference.layer(1, [*tokens[2:], drafted[0]], states)
    expected.append(second[-1])
    fed = states
    for size in (2, 3):  # chained: its own output at the token before
        fed = torch.cat([fed, own[-1:]])
        more, own, _ = reference.layer(1, [*tokens[2:], *drafted[:size]], fed)
        expected.append(more[-1])
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got[-1], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normed", [True, False])
def test_the_better_hidden_state_is_taken_and_logged(normed, tmp_path, caplog):
    """A target that repeats its last token, and a layer that copies the state it was made for."""
    reference = MtpReference(MTP_FAMILIES["mimo"])
    with torch.no_grad():
        for block in (*reference.target.model.layers, reference.blocks[0]):
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        embedding, norm = reference.target.get_input_embeddings().weight, reference.target.model.norm.weight
        norm.copy_(torch.randn(len(norm)).sign())
        reference.target.lm_head.weight.copy_(embedding * norm)
        width = len(norm)
        reference.projections[0].weight.zero_()
        reference.projections[0].weight[:, :width] = torch.eye(width)  # MiMo has the hidden state first
        reference.hidden_norms[0].weight.fill_(1.0)
        reference.norms[0].weight.copy_(torch.ones(width) if normed else norm)
    folder = reference.save(tmp_path)
    with caplog.at_level(logging.INFO):
        loaded = load_mtp(opened(folder), None, None, folder)
    states = loaded.states
    assert (states.normed, states.chained_normed) == (normed, normed)
    assert loaded.net.normed == normed
    right, wrong = (states.after, states.before)[:: 1 if normed else -1]
    assert right is not None and wrong is not None and right > 0.9 > 0.5 > wrong
    assert f"hidden states are read {'after' if normed else 'before'} the final norm" in caplog.text


def test_a_setting_overrides_the_measurement(tmp_path: Path) -> None:
    folder = MtpReference(MTP_FAMILIES["mimo"]).save(tmp_path)
    target = opened(folder)
    for normed in (True, False):
        loaded = load_mtp(target, None, None, folder, normed, not normed)
        assert loaded.taps == (target.num_layers + (not normed),)
        assert loaded.net.normed != normed and loaded.states.after is None
    with pytest.raises(InvalidRequest, match="hidden_states must be 'after_norm' or 'before_norm'"):
        MtpConfig(hidden_states="both")


class Beyond:
    """A tokenizer with more tokens than the target."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, 3] if text.startswith("def") else [10**6]}


def test_what_the_target_cannot_take_is_not_measured(tmp_path: Path) -> None:
    folder = MtpReference(MTP_FAMILIES["mimo"]).save(tmp_path)
    assert load_mtp(opened(folder), Beyond(), None, folder).states.after is not None
    short = load_model(folder, "float32", "cpu", "native", max_length=TOKENS)
    states = load_mtp(short, None, None, folder).states
    assert (states.normed, states.chained_normed, states.after) == (True, True, None)


def shipped(tiny_pair: Any, folder: Path) -> Path:
    """The tiny pair's target with an MTP layer of MiMo's names, in which its family is irrelevant."""
    tiny.linked(tiny_pair.target, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(tiny_pair.target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    width, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    at = "model.mtp_layers.0."
    layer = {at + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    norms = {f"{at}{name}.weight": torch.ones(width) for name in ("token_layernorm", "hidden_layernorm")}
    norms[f"{at}final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    projection = torch.cat([torch.eye(width), 0.1 * torch.eye(width)], dim=1)
    save_file({**tensors, **layer, **norms, f"{at}input_proj.weight": projection}, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_llm_takes_the_layer_that_the_checkpoint_ships(tiny_pair: Any, tmp_path: Path) -> None:
    folder = shipped(tiny_pair, tmp_path / "target")
    plain = LLM(folder, dtype="float32", speculative_config={"method": "none"})
    assert plain.methods == ("none",)
    llm = LLM(folder, dtype="float32")
    assert llm.methods == ("auto", "mtp")
    alone = llm.proposer_of("mtp")
    assert isinstance(alone, Union) and isinstance(alone.sources[0].proposer, Mtp)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True, speculative_tokens=5)
    outputs = [one.generate("def greet(name):", params)[0].outputs[0] for one in (plain, llm)]
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[1].stats.drafted > 0


def test_prompt_logprobs_do_not_shift_what_the_head_reads(tiny_pair: Any, tmp_path: Path) -> None:
    """They score prompt tokens as a draft, so the state at the last one comes before the token after it is known."""
    target = shipped(tiny_pair, tmp_path / "target")
    plain = LLM(target, dtype="float32", speculative_config={"method": "none"})
    vocab, prompts = plain.target.vocab_size, ["def greet(name):\n    return", "import os\n" * 5]
    tiny.save(tmp_path / "eagle3", *tiny.eagle3(vocab=vocab))
    tiny.save(tmp_path / "dspark", *blocks.dspark(vocab=vocab))
    for config in ({"method": "mtp"}, *({"method": m, "model": str(tmp_path / m)} for m in ("eagle3", "dspark"))):
        llm = LLM(target, dtype="float32", speculative_config={**config, "num_speculative_tokens": 4})
        accepted = []
        for logprobs in (None, 1, 1):
            params = SamplingParams(
                max_tokens=12, temperature=0.0, ignore_eos=True, speculative_tokens=4, prompt_logprobs=logprobs
            )
            got = [o.outputs[0] for o in llm.generate(prompts, params)]
            assert [o.token_ids for o in got] == [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
            assert all(o.stats.drafted for o in got)
            accepted.append([o.stats.accepted for o in got])
        assert accepted[0] == accepted[1] == accepted[2]


@pytest.mark.parametrize("method", ["mtp", "dspark"])
def test_a_prompt_that_was_not_drafted_for_is_reused(method: str, tiny_pair: Any, tmp_path: Path) -> None:
    folder = shipped(tiny_pair, tmp_path / "target")
    target = opened(folder)
    if not target.enable_prefix_cache(2**24):
        pytest.skip("no compiled kernels here")
    config = {"method": method}
    if method == "dspark":
        config["model"] = str(tiny.save(tmp_path / "head", *blocks.dspark(vocab=target.vocab_size)))
    llm = LLM(folder, dtype="float32", speculative_config=config, enable_prefix_caching=True)
    prompt = list(range(1, 161))
    cached = [llm.generate(prompt, SamplingParams(max_tokens=1))[0].outputs[0].stats.cached for _ in range(2)]
    assert cached == [0, 128]


def test_rows_that_wait_for_the_head_are_bounded(tiny_pair: Any, tmp_path: Path) -> None:
    """A text that is not drafted for keeps no states of the whole text, nor those of its batch."""
    folder = shipped(tiny_pair, tmp_path / "target")
    target = opened(folder)
    proposer = mtp(target, folder)
    contexts = [Context(i, text(8, i), 8, SamplingLaw(), Streams(i)) for i in range(2)]
    engine = Engine(target, proposer, Fixed(0), prompt_rows=4)
    for context in contexts:
        engine.add(context, Length(30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_states, "MAX_PENDING", 6)
        patch.setattr(hidden_states, "MAX_PENDING_BYTES", 0)
        patch.setattr(hidden_states, "LATE_STEPS", 4)
        for _ in range(20):
            engine.step()
    for context in contexts:
        kept = proposer._handles[context.id].taps
        assert 0 < sum(map(len, kept)) <= 6 + 4
        for tapped, rows in (chunk for part in kept for chunk in part.chunks):
            assert isinstance(tapped, Tapped)
            memory = tapped.states if tapped.states.base is None else tapped.states.base
            assert memory.nbytes <= 8 * len(rows) * tapped.states[:, 0].nbytes
    texts = []
    for controller in (Fixed(0), Fixed(4)):
        other = opened(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hidden_states, "MAX_PENDING", 6)
            patch.setattr(hidden_states, "MAX_PENDING_BYTES", 0)
            texts.append(run(Engine(other, mtp(other, folder), controller, prompt_rows=4), [text(40, 1)])[0])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("steps", [5, 40])
def test_states_that_are_read_late_change_no_draft(steps: int, tiny_pair: Any, tmp_path: Path) -> None:
    """Requests of a batch draft in one of some steps, and end in different ones."""

    class Seldom(Fixed):
        def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
            caps = super().budgets(contexts, max_draft_tokens)
            return [cap if c.generated % steps == steps - 1 else 0 for cap, c in zip(caps, contexts, strict=True)]

    folder, found = shipped(tiny_pair, tmp_path / "target"), []
    for late in (1, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hidden_states, "LATE_STEPS", late)
            target = opened(folder)
            engine = Engine(target, mtp(target, folder), Seldom(4), prompt_rows=4)
            found.append(run(engine, [text(8, 1), text(40, 2)], length=60))
            assert engine.proposer._handles == {}  # type: ignore[attr-defined]
    assert found[0] == found[1] and found[0][1] > 0


@pytest.mark.parametrize("kind", ["torchao", "awq"])
def test_layers_of_a_quantized_checkpoint_are_found(kind: str, tiny_pair: Any, tmp_path: Path) -> None:
    folder = shipped(tiny_pair, tmp_path / "target")
    assert has_mtp(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("proj.weight", "input_proj.weight"))]:
        matrix, stem = tensors.pop(name), name.removesuffix("weight")
        if kind == "torchao":
            scales = matrix.abs().amax(1, keepdim=True) / 127
            tensors[f"{stem}_weight_qdata"] = (matrix / scales).round().to(torch.int8)
            tensors[f"{stem}_weight_scale"] = scales
        else:
            rows, columns = matrix.shape
            tensors[f"{stem}qweight"] = torch.zeros(columns, rows // 8, dtype=torch.int32)
            tensors[f"{stem}qzeros"] = torch.zeros(columns // 16, rows // 8, dtype=torch.int32)
            tensors[f"{stem}scales"] = torch.ones(columns // 16, rows, dtype=torch.float16)
    save_file(tensors, file)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16} if kind == "awq" else None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()  # a link
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    assert has_mtp(folder)
    assert len(read_mtp(folder, torch.float32)) == 1


def test_layers_of_another_target_are_refused(tiny_pair: Any, tmp_path: Path) -> None:
    folder = MtpReference(MTP_FAMILIES["deepseek-v3"]).save(tmp_path)
    target = load_model(tiny_pair.target, "float32", "cpu")
    if target.hidden_size != 64:
        with pytest.raises(ModelLoadError, match="hidden size"):
            load_mtp(target, None, folder, tiny_pair.target)
    with pytest.raises(InvalidRequest, match="foretoken train mtp"):
        load_mtp(target, None, None, tiny_pair.target)
