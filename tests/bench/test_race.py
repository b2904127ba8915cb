"""The order of the turns, the contents of the rows, and which systems are skipped with which reason."""

import json
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from foretoken.bench import race as entering
from foretoken.bench.page import label
from foretoken.bench.peers import registry
from foretoken.bench.peers.protocol import Answer, PeerRequest, Setup
from foretoken.bench.peers.worker import PeerError
from foretoken.bench.race import Entrant, Pool, RaceTask, mark_best, race, ratios, summarize, turns
from foretoken.core.errors import InvalidRequest


@dataclass
class Fake:
    """A worker in this process: deeper is faster, up to ``best``."""

    setup: Setup
    log: list[tuple[str, int]] = field(default_factory=list)
    version: str = "1"
    best: int = 4
    closed: bool = False
    resident_bytes: int = 2**20

    def answer(self, question: PeerRequest) -> Answer:
        if self.setup.method == "fails":
            raise PeerError("fake fails: out of luck")
        self.log.append((self.setup.system, question.depth))
        rate = 10.0 * (1 + min(question.depth, 2 * self.best - question.depth))
        tokens = [prompt[-1:] * question.max_tokens for prompt in question.prompts]
        total = sum(map(len, tokens))
        return Answer(tokens, total / rate + 0.5, 0.5, 0, total // (1 + question.depth))

    def close(self) -> None:
        self.closed = True


def entrant(system: str, method: str = "plain", depth: int = 0) -> Entrant:
    return Entrant(system, method, depth, Setup(system, method, "target"))


TASK = RaceTask([[[1, 2]], [[3]]], [20, 20], 0.0)


def test_every_repeat_begins_with_another():
    assert turns(3, 4) == [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]


def test_rows_of_an_interleaved_race():
    log: list[tuple[str, int]] = []
    racers = [entrant("foretoken"), *(entrant("foretoken", "draft_model", k) for k in (2, 4, 6)), entrant("other")]
    rows, race_answers = race(racers, [TASK], 2, lambda s: Fake(s, log), print)
    first = [entry for entry in log if entry[0] != "x"][:: len(TASK.groups) + 1]
    assert first[:5] == [("foretoken", 0), ("foretoken", 2), ("foretoken", 4), ("foretoken", 6), ("other", 0)]
    assert first[5:] == [*first[1:5], first[0]]
    assert all(len(answers) == 2 for answers in race_answers.values())
    best = [row for row in rows if row.best]
    assert [(r.system, r.method, r.num_speculative_tokens) for r in best] == [
        ("foretoken", "plain", 0),
        ("foretoken", "draft_model", 4),
        ("other", "plain", 0),
    ]
    fastest = best[1]
    assert fastest.decode_tokens_per_second == pytest.approx(50)
    assert fastest.tokens_per_second == pytest.approx(40 / (40 / 50 + 1))
    assert fastest.prefill_seconds == 0.5
    assert fastest.resident_bytes == 2**20
    assert fastest.tokens_per_pass == pytest.approx(5)
    assert fastest.identical_to_plain is True and fastest.identical_texts == fastest.texts == 2
    assert {ratio["over"] for ratio in ratios(rows)} == {"foretoken plain", "other plain"}
    assert ratios(rows)[0]["decode_tokens_per_second"] == pytest.approx(5)


def answer(tokens: list[list[int]], seconds: float) -> Answer:
    return Answer(tokens, seconds, seconds / 2, 2, 4)


def test_medians_spreads_and_texts_that_differ():
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    repeats = [[answer(texts, s)] for s in (1.0, 4.0, 2.0)]
    repeats[2] = [answer([[1, 2, 3, 4], [5, 6, 7, 9]], 2.0)]
    task = RaceTask([[[0], [0]]], [4], 0.0)
    row = summarize(entrant("a", "draft_model", 3), "1", task, repeats, repeats[0])
    assert row.tokens_per_second == 4
    assert row.tokens_per_second_spread == (2, 8)
    assert row.decode_tokens_per_second == 6
    assert (row.identical_texts, row.texts, row.identical_to_plain) == (1, 2, False)
    assert (row.batch, row.tokens_per_pass) == (2, 2)
    drawn = summarize(entrant("a"), "1", replace(task, temperature=1.0), repeats, repeats[0])
    assert drawn.identical_to_plain is None and drawn.identical_texts is None
    json.dumps(vars(row))


def test_the_best_depth_is_chosen_for_each_temperature():
    racers = [entrant("foretoken", "draft_model", k) for k in (1, 4)]
    rows, _ = race(racers, [TASK, replace(TASK, temperature=1.0)], 1, lambda s: Fake(s), print)
    assert [(row.temperature, row.best) for row in rows] == [(0, False), (0, True), (1, False), (1, True)]
    assert mark_best([]) == []


def test_one_that_fails_is_named_and_left_out():
    said: list[str] = []
    rows, _ = race([entrant("foretoken"), entrant("bad", "fails")], [TASK], 2, lambda s: Fake(s), said.append)
    assert [row.system for row in rows] == ["foretoken"]
    assert said == ["fake fails: out of luck. Racing without it."]


def test_memory_decides_who_stays():
    """Room for two: the one whose turn is farthest goes, and no model is loaded twice in a row."""
    setups = {name: Setup(name, "plain", "t") for name in "abc"}
    loaded: list[str] = []
    made: dict[str, Fake] = {}

    def start(setup: Setup) -> Fake:
        loaded.append(setup.system)
        made[setup.system] = Fake(setup)
        return made[setup.system]

    schedule = [setups[name] for name in "abcabc"]
    pool = Pool(start, schedule, fits=lambda setup: sum(not fake.closed for fake in made.values()) < 2)
    with closing(pool):
        for turn, setup in enumerate(schedule):
            assert pool.get(turn) is made[setup.system]
    assert loaded == ["a", "b", "c", "b"]
    assert all(fake.closed for fake in made.values())


SHARED, DEPTHS = Setup("foretoken", "plain", "target", "draft"), (2, 4)


def test_our_entrants_follow_the_configurations():
    configs = [{"method": "draft_model"}, {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 5}]
    assert [e.method for e in entering.own(SHARED, configs, DEPTHS)] == ["plain", "draft_model", "draft_model", "ngram"]
    configs.append({"method": "ngram", "num_speculative_tokens": 6})
    ours = entering.own(SHARED, configs, DEPTHS)
    assert [(e.method, e.depth) for e in ours] == [
        ("plain", 0),
        ("draft_model", 2),
        ("draft_model", 4),
        ("ngram prompt_lookup_max=3", 5),
        ("ngram", 6),
    ]
    assert ours[0].setup == ours[1].setup == ours[2].setup
    assert dict(ours[3].setup.options) == {"method": '"ngram"', "prompt_lookup_max": "3"}
    assert ours[3].setup.draft == ""
    with pytest.raises(InvalidRequest, match="unknown key"):
        entering.own(SHARED, [{"metod": "ngram"}], DEPTHS)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Every peer's environment looks set up, and nothing is really exported."""
    monkeypatch.setattr(registry, "folder", lambda: tmp_path)
    for name in ("openvino", "vllm", "llamacpp"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    server = tmp_path / "llamacpp" / "build" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.touch()
    monkeypatch.setattr(entering.export, "openvino", lambda path, weights: Path(f"{path}-{weights}"))
    monkeypatch.setattr(entering.export, "gguf", lambda path, kind: Path(f"{path}-{kind}.gguf"))


def test_peers_share_a_process_where_they_can(installed):
    said: list[str] = []
    configs = [{"method": "draft_model"}, {"method": "ngram"}, {"method": "draft_model", "num_speculative_tokens": 9}]
    result = entering.peers(SHARED, configs, DEPTHS, list(registry.PEERS.values()), said.append)
    assert not said
    by = {name: [e for e in result if e.system == name] for name in registry.PEERS}
    assert [(e.method, e.depth) for e in by["transformers"]] == [
        ("plain", 0),
        ("draft_model", 2),
        ("draft_model", 4),
        ("ngram", 2),
        ("ngram", 4),
    ]
    assert [(e.method, e.depth) for e in by["openvino"]] == [("plain", 0), ("draft_model", 2), ("draft_model", 4)]
    assert len({e.setup for e in by["transformers"]}) == 2
    assert len({e.setup for e in by["openvino"]}) == 2
    assert by["openvino"][0].setup.target == "target-bf16"
    assert len({e.setup for e in by["vllm"]}) == len(by["vllm"]) == 5
    assert len({e.setup for e in by["llamacpp"]}) == len(by["llamacpp"]) == 5
    assert (by["llamacpp"][1].setup.target, by["llamacpp"][1].setup.draft) == ("target-BF16.gguf", "draft-BF16.gguf")


def test_engines_that_cannot_race_are_reported_in_one_line(installed):
    said: list[str] = []
    wanted = list(registry.PEERS.values())
    assert {e.system for e in entering.peers(replace(SHARED, batch=8), [{}], DEPTHS, wanted, said.append)} == {"vllm"}
    assert [line.split()[0] for line in said] == ["transformers", "openvino", "llamacpp"]
    said.clear()
    quantized = entering.peers(replace(SHARED, quantization="int8"), [{}], DEPTHS, wanted, said.append)
    assert {(e.system, e.setup.target, e.setup.draft) for e in quantized if e.depth} == {
        ("openvino", "target-int8", "draft-bf16"),
        ("llamacpp", "target-Q8_0.gguf", "draft-BF16.gguf"),
    }
    assert [line.split()[0] for line in said] == ["transformers", "vllm"]


@pytest.mark.parametrize(
    "quantization, ours, stored",
    [
        ("int4-g64", ("target", "int4-g64"), {"openvino": "int4-g64", "llamacpp": "Q4_0"}),
        ("int4", ("target", "int4"), {"openvino": "int4-g32", "llamacpp": "Q4_0"}),
        ("Q4_K_M", ("target-Q4_K_M.gguf", "Q4_K_M"), {"openvino": "int4-g128", "llamacpp": "Q4_K_M"}),
        ("Q6_K", ("target-Q6_K.gguf", "Q6_K"), {"llamacpp": "Q6_K"}),
    ],
)
def test_each_system_has_the_nearest_weights(installed, quantization, ours, stored):
    shared = replace(SHARED, quantization=quantization)
    mine = entering.own(shared, [{}], DEPTHS)[0].setup
    assert (mine.target, mine.weights, mine.quantization) == (*ours, quantization)
    found = entering.peers(shared, [{}], DEPTHS, list(registry.PEERS.values()), lambda line: None)
    assert {e.system: e.setup.weights for e in found} == stored


def test_one_gguf_file_is_raced_by_those_that_read_it(installed, monkeypatch):
    monkeypatch.setattr(entering.export, "gguf", lambda path, kind: path)
    said: list[str] = []
    shared = replace(SHARED, target="model.gguf", quantization="Q5_K_S")
    mine = entering.own(shared, [{}], DEPTHS)
    found = mine + entering.peers(shared, [{}], DEPTHS, list(registry.PEERS.values()), said.append)
    assert {(e.system, e.setup.target, e.setup.weights) for e in found} == {
        ("foretoken", "model.gguf", "Q5_K_S"), ("llamacpp", "model.gguf", "Q5_K_S"),
    }  # fmt: skip
    assert [line.split()[0] for line in said] == ["transformers", "openvino", "vllm"]
    drafts = entering.peers(replace(SHARED, draft="d.gguf"), [{}], DEPTHS, list(registry.PEERS.values()), print)
    assert {(e.system, e.setup.draft) for e in drafts if e.depth} == {("llamacpp", "d.gguf")}


def test_other_weights_are_shown_beside_the_method():
    setup = Setup("openvino", "plain", "t", quantization="Q4_0", weights="int4-g128")
    heat = [[answer([[1, 2], [3, 4]], 1.0)]]
    row = summarize(Entrant("openvino", "plain", 0, setup), "1", TASK, heat, None)
    assert label(row) == "openvino plain (int4-g128)"
    assert label(replace(row, weights="Q4_0")) == "openvino plain"


def test_a_missing_peer_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "folder", lambda: tmp_path)
    said: list[str] = []
    assert entering.peers(SHARED, [{}], DEPTHS, [registry.PEERS["vllm"]], said.append) == []
    assert len(said) == 1 and "vllm is not set up" in said[0] and "`make peers`" in said[0]


def test_unknown_peers_are_refused():
    assert registry.chosen("none") == []
    assert [peer.name for peer in registry.chosen("vllm, transformers")] == ["vllm", "transformers"]
    with pytest.raises(InvalidRequest, match=r"unknown peer 'vlm'; known: transformers, openvino, vllm, llamacpp"):
        registry.chosen("vlm")
