"""The race: systems take turns within each repeat, in another order each time: a machine that drifts drifts for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from foretoken.bench.peers.protocol import Answer, Ask, Setup
from foretoken.bench.peers.worker import PeerError
from foretoken.bench.pool import Asked, Pool

WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Entrant:
    """One row: a system, how it speculates and how far. Entrants with the same setup share a process."""

    system: str
    method: str
    depth: int
    setup: Setup


@dataclass(frozen=True)
class Course:
    """What all complete: groups of prompts that run at once, each prompt as token ids."""

    groups: list[list[list[int]]]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Row:
    """Medians over the repeats; spreads are the lowest and the highest.

    prefill_seconds: until every prompt of a group had its first tokens. tokens_per_pass: emitted tokens over target
    passes. identical_to_plain: whether all texts are the system's own plain ones, None where texts are drawn afresh.
    best: the depth at which this system and method were fastest. law_z, law_excess: of drawn texts, see ``law.py``, in
    standard errors and in nats a token.
    """

    system: str
    version: str
    method: str
    num_speculative_tokens: int
    quantization: str
    temperature: float
    batch: int
    tokens_per_second: float
    tokens_per_second_spread: tuple[float, float]
    decode_tokens_per_second: float
    decode_tokens_per_second_spread: tuple[float, float]
    prefill_seconds: float
    tokens_per_pass: float
    identical_to_plain: bool | None
    identical_texts: int | None
    texts: int
    repeats: int
    best: bool = False
    law_z: float | None = None
    law_excess: float | None = None


def turns(count: int, repeats: int) -> list[int]:
    """Who is next: everybody once a repeat, each repeat beginning with another."""
    return [(i + r) % count for r in range(repeats) for i in range(count)]


Heats = dict[tuple[Entrant, float], list[list[Answer]]]  # by entrant and temperature: the answers of every repeat


def race(
    entrants: Sequence[Entrant],
    courses: Sequence[Course],
    repeats: int,
    start: Callable[[Setup], Asked],
    say: Callable[[str], None],
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> tuple[list[Row], Heats]:
    """All entrants on all courses, interleaved. -> rows, and the answers, of every entrant that finished

    ``start`` loads a system, ``say`` takes a line on one that failed, ``track`` shows how far it is.
    """
    pairs = [(entrant, course) for entrant in entrants for course in courses]
    order = turns(len(pairs), repeats)
    heats: Heats = {(entrant, course.temperature): [] for entrant, course in pairs}
    versions: dict[Setup, str] = {}
    failed: set[Setup] = set()
    with Pool(start, [pairs[i][0].setup for i in order]) as pool:
        for turn in track(range(len(order))):
            entrant, course = pairs[order[turn]]
            if entrant.setup in failed:
                continue
            try:
                worker = pool.get(turn)
                versions[entrant.setup] = worker.version
                heats[entrant, course.temperature].append(run(worker, entrant, course))
            except PeerError as error:
                failed.add(entrant.setup)
                pool.drop(entrant.setup)
                say(f"{error}. Racing without it.")
    heats = {key: heat for key, heat in heats.items() if key[0].setup not in failed}
    rows: list[Row] = []
    for course in courses:
        found = {entrant: heat for (entrant, value), heat in heats.items() if value == course.temperature}
        plain = {e.system: heat[0] for e, heat in found.items() if e.method == "plain"}
        rows += mark_best([
            summarise(e, versions[e.setup], course, heat, plain.get(e.system)) for e, heat in found.items()
        ])  # fmt: skip
    return rows, heats


def run(worker: Asked, entrant: Entrant, course: Course) -> list[Answer]:
    """One turn: a short warm-up, then every group once."""

    def ask(group: list[list[int]], tokens: int) -> Answer:
        return worker.ask(Ask(group, tokens, course.temperature, entrant.depth))

    ask(course.groups[0], min(WARM_UP, course.max_tokens))
    return [ask(group, course.max_tokens) for group in course.groups]


def summarise(
    entrant: Entrant, version: str, course: Course, repeats: Sequence[Sequence[Answer]], plain: Sequence[Answer] | None
) -> Row:
    """A row from all repeats of one entrant; ``plain`` is the same system's plain decoding, once."""
    rates = [sum(a.total for a in run) / sum(a.seconds for a in run) for run in repeats]
    decode = [
        sum(a.total - a.first_tokens for a in run) / max(1e-9, sum(a.seconds - a.first_seconds for a in run))
        for run in repeats
    ]
    every = [answer for run in repeats for answer in run]
    texts = [tokens for answer in repeats[0] for tokens in answer.tokens]
    same = None
    if plain is not None and course.temperature == 0:
        wanted = [tokens for answer in plain for tokens in answer.tokens]
        made = [[tokens for answer in run for tokens in answer.tokens] for run in repeats]
        same = sum(all(run[i] == text for run in made) for i, text in enumerate(wanted))
    return Row(
        system=entrant.system,
        version=version,
        method=entrant.method,
        num_speculative_tokens=entrant.depth,
        quantization=entrant.setup.quantization or "bf16",
        temperature=course.temperature,
        batch=max(map(len, course.groups)),
        tokens_per_second=median(rates),
        tokens_per_second_spread=(min(rates), max(rates)),
        decode_tokens_per_second=median(decode),
        decode_tokens_per_second_spread=(min(decode), max(decode)),
        prefill_seconds=median(answer.first_seconds for answer in every),
        tokens_per_pass=sum(a.total for a in every) / max(1, sum(a.passes for a in every)),
        identical_to_plain=None if same is None else same == len(texts),
        identical_texts=same,
        texts=len(texts),
        repeats=len(repeats),
    )


def mark_best(rows: Sequence[Row]) -> list[Row]:
    """Every system and method at the depth where it was fastest."""
    fastest: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (row.system, row.method)
        fastest[key] = max(fastest.get(key, 0.0), row.tokens_per_second)
    return [replace(row, best=row.tokens_per_second == fastest[row.system, row.method]) for row in rows]


def ratios(rows: Sequence[Row], ours: str = "foretoken") -> list[dict[str, Any]]:
    """Our fastest speculation over our plain decoding and over the fastest of each peer, speculating and plain.

    End to end and decoding, each at the depth that was best end to end.
    """
    best = [row for row in rows if row.best]
    mine = max((r for r in best if r.system == ours and r.method != "plain"), key=_rate, default=None)
    if mine is None:
        return []
    others = [max(group, key=_rate) for group in _groups(best) if mine not in group]
    return [
        {
            "over": f"{other.system} {'plain' if other.method == 'plain' else 'speculative'}",
            "tokens_per_second": mine.tokens_per_second / other.tokens_per_second,
            "decode_tokens_per_second": mine.decode_tokens_per_second / other.decode_tokens_per_second,
        }
        for other in others
        if other.tokens_per_second and other.decode_tokens_per_second
    ]


def _rate(row: Row) -> float:
    return row.tokens_per_second


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by system, plain decoding apart from speculation."""
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.system, row.method == "plain"), []).append(row)
    return list(groups.values())
