"""Clocks, lower bounds, the parts of a step, the test of a distribution; measured costs are kept and interpolated."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.drafters import drafter

from foretoken import LLM, SamplingParams
from foretoken.bench import costs as module
from foretoken.bench.costs import Floor, Loaded, known, matrices, measured, pass_costs, step_cost
from foretoken.bench.measure import TimedTask, interleaved, step_times
from foretoken.bench.sampling_bias import sampling_bias
from foretoken.bench.workloads import FUNCTIONS, encoded_prompts, ragged
from foretoken.core.errors import InvalidRequest
from foretoken.costs.measured import MeasuredCosts, PassCost, TimeSpread
from foretoken.models.base import Model
from foretoken.train.widen.checkpoint import like


def test_turns_are_interleaved_and_reset_is_not_timed():
    log: list[str] = []
    tasks = {name: TimedTask(lambda name=name: log.append(name), lambda: log.append("-")) for name in "abc"}
    spreads = interleaved(tasks, 3)
    runs = "".join(log).replace("-", "")
    assert runs == "abc" + "abc" + "bca" + "cab"
    assert log[1::2] == ["-"] * 12
    assert all(spread.turns == 3 for spread in spreads.values())
    assert interleaved({"told": TimedTask(lambda: 2.0, burst=3)}, 2)["told"] == TimeSpread(2.0, 2.0, 2.0, 2)


CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 400,
}


def test_the_floor_streams_every_weight_of_the_model():
    from transformers import GPT2Config

    shapes = matrices(CONFIG)
    by_hand = 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96) + 400 * 64
    assert sum(o * i for o, i in shapes) == by_hand
    for dtype in (torch.float32, torch.bfloat16):
        Floor(shapes, dtype)(4)
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 400, "n_positions": 99}  # other names, ungated
    other = GPT2Config(**sizes).to_dict()
    assert sum(o * i for o, i in matrices(other)) == 3 * (4 * 64 * 64 + 2 * 64 * 256) + 400 * 64


@pytest.mark.parametrize(("quantization", "bits"), [("", 16), ("int8", 8)])
def test_weights_are_counted_as_they_are_held(quantization, bits):
    """Weights of a model whose runner does not count them."""
    loaded = Loaded(Path(), SimpleNamespace(dtype=torch.bfloat16), CONFIG, 0, quantization)
    assert loaded.weights_bytes == bits // 8 * sum(rows * columns for rows, columns in matrices(CONFIG))


def test_the_scaled_pair_has_the_matrices_of_its_size():
    wide = like("0.7b")
    shapes = matrices(vars(wide) | {"head_dim": 64, "vocab_size": 4096})
    assert 0.6e9 < sum(o * i for o, i in shapes) < 0.8e9


def test_pass_costs_keep_the_context(tiny_pair):
    loaded = Loaded.of(tiny_pair.target)
    opened: list[object] = []
    original = loaded.model.open
    loaded.model.open = lambda prompt, source: opened.append(original(prompt, source)) or opened[-1]
    costs = pass_costs(loaded, [1, 3], [8, 40], turns=2, batch=2)
    assert [(c.context, c.rows) for c in costs] == [(8, 1), (8, 3), (40, 1), (40, 3)]
    assert all(len(handle.tokens) in (8, 40) for handle in opened)
    assert [c.kv_bytes for c in costs[1:3]] == [2 * context * loaded.model.kv_bytes_per_token for context in (8, 40)]
    assert all(c.seconds.median > 0 and c.floor and c.over_floor > c.over_read for c in costs)
    with pytest.raises(InvalidRequest, match="does not fit"):
        pass_costs(loaded, [1], [10_000], turns=1)


@pytest.mark.parametrize("own, taken", [(1e-9, True), (1e3, False)])
def test_the_floor_is_the_faster_of_two_bare_products(tiny_pair, own, taken):
    loaded = Loaded.of(tiny_pair.target)
    loaded.model.runner.floor = lambda rows: rows * own
    (cost,) = pass_costs(loaded, [4], [8], turns=2)
    assert (cost.floor.median == 4 * own) is taken


def test_a_step_beside_transformers(tiny_pair):
    cost = step_cost(Loaded.of(tiny_pair.draft), context=16, turns=2)
    assert cost.ratio == cost.foretoken.median / cost.transformers.median > 0


def test_the_parts_of_a_step_add_up(tiny_pair):
    llm = LLM(tiny_pair.target, tiny_pair.draft, speculative_config={"method": "draft_model"})
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, speculative_tokens=2)
    result = step_times(llm, ["def f(", "class"], params)
    assert result.steps >= 2 and result.tokens <= 22
    parts = result.per_step()
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total)
    assert min(parts["target"], parts["draft"], parts["other"]) > 0
    assert 0 < result.outside < 1
    model = drafter(llm).model
    assert isinstance(model, Model) and not {"score", "chains"} & vars(model).keys()


def test_a_bent_law_shows(tiny_pair, tokenizer):
    """Draws at temperature 1 pass; texts sampled at 0.7, or greedily, and with_sampling_bias at 1 do not."""
    llm = LLM(tiny_pair.target)
    prompt = tokenizer.encode("def greet(")

    def z(temperature: float) -> float:
        params = SamplingParams(max_tokens=60, temperature=temperature, ignore_eos=True)
        texts = [o.outputs[0].token_ids for o in llm.generate([prompt] * 8, params)]
        first, *rest = (sampling_bias(llm.target, prompt, text, 1.0) for text in texts)
        return sum(rest, first).z

    assert abs(z(1.0)) < 4
    assert z(0.7) < -5
    assert z(0.0) < -5


def test_ragged_prompts_span_their_range():
    def encode(text: str) -> list[int]:
        return list(text.encode())

    prompts = ragged(encode, count=16)
    assert sorted(map(len, prompts))[0] == 20 and sorted(map(len, prompts))[-1] == 1000
    assert len({len(prompt) for prompt in prompts[:4]}) == 4
    assert all(bytes(prompt).decode() in FUNCTIONS[i % 8] for i, prompt in enumerate(prompts) if len(prompt) < 100)
    assert prompts == ragged(encode, count=16)


def test_prompts_of_a_file_go_through_the_chat_template(tokenizer, tmp_path):
    tokenizer, file = copy.deepcopy(tokenizer), tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def f("}\n{"turns": ["a b", "c"]}\n')
    assert encoded_prompts(tokenizer, file) == [tokenizer(text)["input_ids"] for text in ("def f(", "a b")]
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert encoded_prompts(tokenizer, file) == [tokenizer(text)["input_ids"] for text in ("<def f(>", "<a b>")]
    assert encoded_prompts(tokenizer, None, 1) == [tokenizer(FUNCTIONS[0])["input_ids"]]


def passes(*points: tuple[int, float], batch: int = 1, context: int = 256) -> tuple[PassCost, ...]:
    return tuple(
        PassCost(rows, context, batch, TimeSpread(ms / 1e3, ms / 1e3, ms / 1e3, 3), None, 10, 1000)
        for rows, ms in points
    )


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    return tmp_path


def test_jagged_curves_are_read_as_they_are():
    costs = MeasuredCosts("a", "0", passes((1, 10.0), (4, 10.0), (5, 16.0), (8, 15.0)))
    assert costs.seconds(1) == costs.seconds(3) == pytest.approx(0.010)
    assert costs.seconds(5) == pytest.approx(0.016)
    assert costs.seconds(7) == pytest.approx(0.016 - 2 / 3 * 0.001)
    assert costs.seconds(12) == pytest.approx(0.015), "a curve that falls at its end does not go on falling"
    grown = costs.merged(passes((8, 20.0)) + passes((1, 30.0), batch=4))
    assert grown.seconds(10) == pytest.approx(0.020 + 2 * 0.004 / 3)
    assert grown.seconds(1, batch=4) == pytest.approx(0.030)
    with pytest.raises(KeyError):
        costs.seconds(1, batch=2)


def test_the_nearest_context_counts():
    costs = MeasuredCosts("a", "0", passes((1, 10.0)) + passes((1, 50.0), context=4096))
    assert costs.seconds(1, context=512) == pytest.approx(0.010)
    assert costs.seconds(1, context=3000) == pytest.approx(0.050)


@pytest.mark.slow
def test_costs_are_measured_once(tiny_pair, cache, monkeypatch):
    loaded = Loaded.of(tiny_pair.target)
    first = measured(loaded, rows=(1, 2), contexts=(16,), batches=(1, 2), turns=2)
    assert [(c.batch, c.rows) for c in first.passes] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(cost.seconds.median > 0 and cost.floor is not None for cost in first.passes)
    monkeypatch.setattr(module, "pass_costs", lambda *_: pytest.fail("measured again"))
    assert measured(loaded, rows=(1, 2), contexts=(16,), batches=(2, 1)) == first
    assert list(known(loaded).lacks((1, 4), (16,), (1,))) == [(16, 1)]
    json.dumps(first.to_dict())
    assert [file.suffix for file in (cache / "costs").iterdir()] == [".json"]


def test_another_checkpoint_type_or_machine_is_another_curve(tiny_pair, cache, monkeypatch):
    loaded = Loaded.of(tiny_pair.target)
    kinds = {loaded.identity, replace(loaded, quantization="int8").identity, Loaded.of(tiny_pair.draft).identity}
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    kinds.add(loaded.identity)
    monkeypatch.setattr(module, "processor", lambda: "another")
    kinds.add(loaded.identity)
    assert len(kinds) == 5


def test_a_damaged_or_unwritable_cache_is_no_obstacle(tiny_pair, cache, monkeypatch):
    loaded = Loaded.of(tiny_pair.target)
    measured(loaded, rows=(1,), contexts=(8,), turns=1)
    (file,) = (cache / "costs").iterdir()
    file.write_text("{")
    assert known(loaded).passes == ()
    (cache / "blocked").write_text("")
    monkeypatch.setenv("FORETOKEN_CACHE", str(cache / "blocked"))
    assert len(measured(loaded, rows=(1,), contexts=(8,), turns=1).passes) == 1
