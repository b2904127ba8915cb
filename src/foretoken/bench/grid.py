"""The table of benchmarks: a race for every cell of prompts, temperature, weights and batch, kept once it is done."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.bench.editing import EDITS
from foretoken.bench.peers.protocol import Setup
from foretoken.bench.peers.registry import OURS, Peer
from foretoken.bench.peers.worker import PeerWorker
from foretoken.bench.race import UNNAMED, Config, RaceRow, RaceTask, own, peers, race
from foretoken.bench.workloads import FUNCTIONS, ragged
from foretoken.core.errors import WriteError
from foretoken.speculation import AUTO

DEFAULT: Config = {}
"""What a user of ours gets with a draft model and without a key."""

PROMPTS = ("completion", "editing", "repetition", "long")
HAND_PICKED: tuple[Config, ...] = (
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "draft_model", "num_speculative_tokens": 8},
    {"method": "draft_model", "tree": "sampled", "num_speculative_tokens": 6},
    {"method": "draft_model", "tree": "sampled", "num_speculative_tokens": 12},
    {"method": "suffix", "num_speculative_tokens": 8},
    {"method": "draft_model", "control": "goodput"},
    {"method": AUTO},
)
"""What a user of ours might choose, beside the default."""
LONG = 1000  # tokens of a long context


@dataclass(frozen=True)
class GridCell:
    """One race."""

    prompts: str  # one of ``PROMPTS``
    temperature: float = 0.0
    quantization: str = ""  # "" is bf16
    batch: int = 1  # prompts completed at once

    @property
    def name(self) -> str:
        return f"{self.prompts}, T={self.temperature:g}, {self.quantization or 'bf16'}, batch {self.batch}"

    def has(self, parts: str) -> bool:
        """Returns whether the name has all of these parts, which commas separate."""
        return {part.strip() for part in parts.split(",")} <= set(self.name.split(", "))


CELLS: tuple[GridCell, ...] = (
    *(GridCell(prompts) for prompts in PROMPTS),
    GridCell("completion", 0.7),
    *(GridCell(prompts, 1.0) for prompts in PROMPTS),
    *(GridCell(prompts, 0.0, weights) for weights in ("int8", "int4") for prompts in ("completion", "editing")),
    *(GridCell("completion", 1.0, weights) for weights in ("int8", "int4")),
    *(GridCell("completion", t, "", batch) for batch in (8, 32) for t in (0.0, 1.0)),
)
"""Every value of every kind, and every pair that a reader asks for; all combinations would take a day."""


@dataclass(frozen=True)
class GridTask:
    """Work of every cell."""

    count: int = 4  # prompts of a batch of one; larger batches run one batch of that size
    max_tokens: int = 64  # tokens of each prompt
    repeats: int = 3  # turns of every system
    picked: tuple[Config, ...] = HAND_PICKED  # configurations of ours that race beside the default
    peer_depths: tuple[int, ...] = (4, 8)  # draft lengths of the peers
    peer_methods: tuple[str, ...] = ("draft_model", "ngram")  # methods of the peers, as far as they have them


class GridRecord:
    """Finished cells in a file, one JSON object a line. A start skips the cells that the same task finished before.

    Args:
        file: Is created with its folder. Lines that were cut off are ignored.
        facts: What must be equal for a kept cell to count: the task, the models and the version.
    """

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self.file, self.facts = file, json.loads(json.dumps(facts))

    def rows(self) -> dict[GridCell, list[RaceRow]]:
        """Returns the rows of every finished cell; the last of a cell counts."""
        finished: dict[GridCell, list[RaceRow]] = {}
        for line in self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else ():
            try:
                entry = json.loads(line)
                if entry["facts"] == self.facts:
                    finished[GridCell(**entry["cell"])] = [_row(row) for row in entry["rows"]]
            except (ValueError, KeyError, TypeError):
                continue
        return finished

    def add(self, cell: GridCell, rows: Sequence[RaceRow]) -> None:
        """Keeps a finished cell. Raises WriteError."""
        entry = {"cell": asdict(cell), "facts": self.facts, "rows": [asdict(row) for row in rows]}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise WriteError(f"cannot keep a finished cell in {self.file}: {error}; choose another --record") from error


def run(
    cells: Sequence[GridCell],
    shared: Setup,
    candidates: Sequence[Peer],
    encode: Callable[[str], list[int]],
    task: GridTask,
    record: GridRecord,
    start: Callable[[Setup], PeerWorker],
    say: Callable[[str], None],
) -> Iterator[tuple[GridCell, list[RaceRow]]]:
    """Races every cell that the record lacks, and yields it once it is kept.

    shared: The models. The cell sets batch, quantization and length.
    """
    finished = record.rows()
    for cell in cells:
        if cell in finished:
            continue
        prompts = prompts_of(cell, encode, task.count)
        longest = max(map(len, prompts)) + task.max_tokens + 32
        setup = replace(shared, batch=cell.batch, quantization=cell.quantization, max_length=longest)
        configs: list[Config] = [DEFAULT, *task.picked]
        methods: list[Config] = [{"method": method} for method in task.peer_methods]
        depths = task.peer_depths
        entrants = own(setup, configs, depths) + peers(setup, methods, depths, candidates, say)
        groups = [prompts[at : at + cell.batch] for at in range(0, len(prompts), cell.batch)]
        rows, _ = race(
            entrants, [RaceTask(groups, [task.max_tokens] * len(groups), cell.temperature)], task.repeats, start, say
        )
        record.add(cell, rows)
        yield cell, rows


def prompts_of(cell: GridCell, encode: Callable[[str], list[int]], count: int) -> list[list[int]]:
    """Returns the prompts of a cell as token ids. No prompt repeats within a batch of one."""
    number = max(count, cell.batch)
    if cell.prompts == "long":
        return ragged(encode, number, LONG // 2, LONG)
    if cell.prompts == "completion" and number > len(FUNCTIONS):
        return ragged(encode, number, 60, 240)
    if cell.prompts == "editing":
        texts = [edit.prompt + edit.edited[: len(edit.edited) // 4] for edit in EDITS]
    elif cell.prompts == "repetition":
        texts = [
            "".join(f"    assert parse('{w}: {i}') == ('{w}', {i})\n" for i, w in enumerate(words)) for words in WORDS
        ]
    else:
        texts = list(FUNCTIONS)
    return [encode(texts[at % len(texts)]) for at in range(number)]


WORDS = (
    ("north", "east", "south", "west"),
    ("red", "green", "blue", "black"),
    ("apple", "pear", "plum", "fig"),
    ("iron", "tin", "zinc", "lead"),
)


class Summary(NamedTuple):
    """The fastest of each kind in one cell, None if nothing ran."""

    default: RaceRow | None  # ours without a choice
    picked: RaceRow | None  # ours with the best fixed configuration
    plain: RaceRow | None  # ours without speculation
    peer: RaceRow | None  # the fastest peer, whatever its method

    @staticmethod
    def of(rows: Sequence[RaceRow]) -> "Summary":
        ordered = sorted(rows, key=lambda row: row.tokens_per_second)
        fastest = {_kind(row): row for row in ordered}
        return Summary(*map(fastest.get, Summary._fields))


def _kind(row: RaceRow) -> str:
    """Returns the field of ``Summary`` for which a row counts."""
    if row.system != OURS.name:
        return "peer"
    return {UNNAMED: "default", "plain": "plain"}.get(row.method, "picked")


def _row(entry: Mapping[str, Any]) -> RaceRow:
    spreads = {key: tuple(value) for key, value in entry.items() if key.endswith("_spread")}
    return RaceRow(**{**entry, **spreads})
