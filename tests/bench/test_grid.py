"""The table of benchmarks: which cells run, what is kept, and what the table says."""

from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_race import Fake

from foretoken.bench import race as entering
from foretoken.bench.grid import CELLS, DEFAULT, PROMPTS, GridCell, GridRecord, GridTask, Summary, prompts_of, run
from foretoken.bench.page import claims, grid_page, line
from foretoken.bench.peers.protocol import OWN_CHOICE, Setup
from foretoken.bench.race import RaceRow

PICKED = ({"method": "draft_model", "num_speculative_tokens": 4}, {"method": "suffix", "num_speculative_tokens": 2})
TASK = GridTask(count=2, max_tokens=8, repeats=1, picked=PICKED)


class Counted(Fake):
    """Its own choice is as fast as the best depth."""

    def answer(self, question: Any) -> Any:
        best = 4 if question.depth == OWN_CHOICE else question.depth
        return super().answer(type(question)(question.prompts, question.max_tokens, question.temperature, best))


def encode(text: str) -> list[int]:
    return list(text.encode())


def rows_of(cells: list[GridCell], record: GridRecord) -> dict[GridCell, list[RaceRow]]:
    shared = Setup("foretoken", "plain", "target", "draft")
    return dict(run(cells, shared, [], encode, TASK, record, Counted, print))


@pytest.fixture(autouse=True)
def unconverted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "_converted", lambda peer, pairing: pairing)


def test_every_value_has_a_cell_and_every_cell_prompts() -> None:
    assert {cell.prompts for cell in CELLS} == set(PROMPTS)
    assert {cell.temperature for cell in CELLS} == {0.0, 0.7, 1.0}
    assert {cell.quantization for cell in CELLS} == {"", "int8", "int4"} and {c.batch for c in CELLS} == {1, 8, 32}
    assert len(set(CELLS)) == len(CELLS)
    for cell in CELLS:
        prompts = prompts_of(cell, encode, 4)
        assert len(prompts) == max(4, cell.batch) and all(prompts)
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts), cell.name


def test_finished_cells_are_kept_and_not_raced_again(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "record.jsonl"
    first, second = CELLS[0], CELLS[1]
    made = rows_of([first], GridRecord(file, {"version": "1"}))
    assert list(made) == [first] and GridRecord(file, {"version": "1"}).rows() == made
    with file.open("a") as kept:
        kept.write('{"cell": {"prompts": "comple')  # the machine went off
        kept.write("\n")
    assert list(rows_of([first, second], GridRecord(file, {"version": "1"}))) == [second]
    assert list(rows_of([first, second], GridRecord(file, {"version": "2"}))) == [first, second]


def test_the_table_compares_the_default_with_all_others(tmp_path: Path) -> None:
    cell = GridCell("completion", 1.0)
    results = rows_of([cell], GridRecord(tmp_path / "record.jsonl", {}))
    own = Summary.of(results[cell])
    assert own.default is not None and own.default.num_speculative_tokens == OWN_CHOICE and own.peer is None
    assert own.picked is not None and own.picked.num_speculative_tokens == 4
    assert len(results[cell]) == 2 + len(PICKED)
    name, default, picked, *_, over_picked, over_plain, over_peer = line(cell, results[cell])
    assert name == "completion, T=1, bf16, batch 1" and "draft" in picked and default
    assert float(over_picked) == 1.0 < float(over_plain) and over_peer == ""
    assert claims(results)[0].startswith("1.00x the best fixed configuration in the median of 1 cells")
    page = grid_page({"date": "2026-11-25"}, results)
    assert page.startswith("<!DOCTYPE html>") and "completion, T=1" in page and "default" in page


def test_a_setup_of_the_default_names_the_draft() -> None:
    (plain, default) = entering.own(Setup("foretoken", "plain", "t", "d"), [DEFAULT], (4,))
    assert (plain.depth, default.depth) == (0, OWN_CHOICE) and isinstance(default.setup, Setup)
    assert default.setup.draft == "d" and not default.setup.options
