"""Cost of sampling distributions and verification: microseconds per step by rule, rows, vocabulary and parameters.

A chain of rows - 1 tokens is drafted from a distribution near the target's, as the rule requires. Timed is what follows
the target's logits, one request at a time. "draft step" is one draft token, from its logits to its id.
Random numbers are recomputed in every call; within a step, verification reuses the numbers that drafting computed.
The logits are synthetic: the token of rank k lies ``slope`` log k below the top, in a random order for each row.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from foretoken.bench.output import cores, figures, report, wide_console
from foretoken.core import streams
from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft, PointMass, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Streams
from foretoken.verify import choose, stream_for
from options import Output, Rows

LAWS = {
    "greedy": SamplingLaw(temperature=0.0),
    "temperature 1": SamplingLaw(),
    "top-p .9": SamplingLaw(top_p=0.9),
    "top-k 50": SamplingLaw(top_k=50),
}
SEEDS = 64  # texts that are verified in turn


@dataclass(frozen=True)
class Case:
    """One kind of request. sampled: whether draft tokens are sampled, so that their distribution travels with them."""

    law: str
    grade: Exactness = Exactness.DISTRIBUTION
    sampled: bool = False

    @property
    def rule(self) -> str:
        if self.grade is Exactness.TRAJECTORY:
            return "coupled"
        return "block" if self.sampled else "walk"


CASES = (
    Case("greedy"),
    *(Case(law, sampled=sampled) for law in list(LAWS)[1:] for sampled in (True, False)),
    *(Case(law, Exactness.TRAJECTORY) for law in list(LAWS)[1:]),
)


@dataclass(frozen=True)
class VerificationInput:
    """The input of one verification."""

    context: Context
    draft: Draft
    logits: Tensor  # [rows, V]


def made_logits(rows: int, vocabulary: int, slope: float, generator: torch.Generator) -> Tensor:
    """Returns logits [rows, V] shaped like a language model's: a few likely tokens and a long tail."""
    ranked = -slope * torch.arange(1, vocabulary + 1).log()
    return torch.stack([ranked[torch.randperm(vocabulary, generator=generator)] for _ in range(rows)])


def draft_step(context: Context, law: SamplingLaw, logits: Tensor, index: int) -> tuple[int, Tensor | None]:
    """Returns one token as a draft model samples it, and its distribution (None if it is an argmax)."""
    rows = NodeDistributions(law, logits, lambda row: context.history())
    certain = rows.certain(0)
    if certain is not None:
        return certain, None
    shared = context.exactness is Exactness.TRAJECTORY
    position = context.generated
    stream = context.streams.shared(position) if shared else context.streams.private(Purpose.DRAFT, position)
    return stream.categorical(rows[0], index), rows[0]


def new_input(case: Case, logits: Tensor, near: Tensor, seed: int) -> VerificationInput:
    """Drafts a chain after a short text. A fixed candidate is the draft's argmax, or its draw from the shared noise."""
    context = Context(seed, [1, 2, 3], 3, LAWS[case.law], Streams(seed), case.grade)
    law = LAWS[case.law] if case.sampled or case.grade is Exactness.TRAJECTORY else LAWS["greedy"]
    steps = [draft_step(context, law, near[i : i + 1], i) for i in range(len(near) - 1)]
    rows = [row for _, row in steps if row is not None]
    made_by = Sampled(torch.stack(rows)) if case.sampled and rows else PointMass()
    return VerificationInput(context, Draft.chain([token for token, _ in steps], made_by), logits)


def verdict(state: VerificationInput) -> int:
    """Verifies as the engine does. Returns the number of accepted tokens."""
    context, draft = state.context, state.draft
    probs = NodeDistributions(context.law, state.logits, partial(context.history_at, draft))
    stream = stream_for(context.exactness, context.streams, context.generated)
    return len(choose(draft.law, context.exactness)(draft, probs, stream).path)


def timed(run: Callable[[int], int], repeats: int) -> tuple[list[float], float]:
    """Returns the sorted microseconds of the calls, and the mean result. Each call starts without cached noise."""
    taken, results = [], []
    for i in range(repeats + 3):
        streams._all_exponentials.cache_clear()
        streams.early_exponentials.cache_clear()
        started = time.perf_counter()
        results.append(run(i))
        taken.append((time.perf_counter() - started) * 1e6)
    return sorted(taken[3:]), statistics.fmean(results[3:])


@torch.inference_mode()
def grid(
    rows: Sequence[int], vocabularies: Sequence[int], repeats: int, slope: float, apart: float
) -> Iterator[dict[str, Any]]:
    """Yields all cells. apart: standard deviation of the difference between draft and target logits."""
    for vocabulary in vocabularies:
        generator = torch.Generator().manual_seed(vocabulary)
        for count in rows:
            logits = made_logits(count, vocabulary, slope, generator)
            near = logits + apart * torch.randn(logits.shape, generator=generator)
            for case in CASES:
                inputs = [new_input(case, logits, near, seed) for seed in range(min(SEEDS, repeats + 3))]
                yield cell(case.rule, case.law, logits, *timed(lambda i: verdict(inputs[i % len(inputs)]), repeats))  # noqa: B023
        for case in CASES:
            if case.rule != "walk" or case.law == "greedy":
                step = partial(one_step, case, near[:1])
                yield cell(
                    "draft step", f"{case.law}{' seeded' * (case.rule == 'coupled')}", near[:1], *timed(step, repeats)
                )


def one_step(case: Case, logits: Tensor, seed: int) -> int:
    """Computes a draft's distribution and its draw, with random numbers that no earlier call has used."""
    context = Context(seed, [1, 2, 3], 3, LAWS[case.law], Streams(-1 - seed), case.grade)
    draft_step(context, LAWS[case.law], logits, 0)
    return 0


def cell(rule: str, law: str, logits: Tensor, taken: Sequence[float], accepted: float) -> dict[str, Any]:
    """Returns one record: median and quartiles in microseconds, and the mean number of accepted draft tokens."""
    quarter, half = len(taken) // 4, len(taken) // 2
    count, vocabulary = logits.shape
    place = {"rule": rule, "law": law, "vocabulary": vocabulary, "rows": count, "accepted": accepted}
    return place | {"median": taken[half], "low": taken[quarter], "high": taken[-1 - quarter]}


def table(cells: Sequence[dict[str, Any]], rows: Sequence[int]) -> Table:
    """Returns a table with a line for each vocabulary, rule and parameters, and a column for each number of rows."""
    by_column = {(*map(c.get, ("vocabulary", "rule", "law")), c["rows"]): c for c in cells}
    lines = []
    for key in dict.fromkeys(column[:3] for column in by_column):
        row = [by_column.get((*key, count)) for count in rows]
        lines.append((*key, *("{median:,.0f} ({accepted:.1f})".format_map(c) if c else "" for c in row)))
    counts = (f"{count} row{'s' * (count > 1)}" for count in rows)
    return figures(("vocabulary", "rule", "parameters", *counts), lines)


def main(
    rows: Rows = [1, 5, 16, 64],
    vocabulary: Annotated[list[int], typer.Option(min=2, help="May be repeated.")] = [4096, 151_936],
    repeats: Annotated[int, typer.Option(min=4)] = 100,
    slope: Annotated[
        float, typer.Option(help="Decay of the distribution: p of rank k is proportional to k to the minus this.")
    ] = 2.0,
    apart: Annotated[
        float, typer.Option(min=0.0, help="Standard deviation between the logits of draft and target.")
    ] = 0.5,
    output: Output = None,
) -> None:
    """Prints the median microseconds per step of distributions and verification, and in brackets accepted tokens."""
    torch.set_num_threads(cores())
    cells: list[dict[str, Any]] = []
    with wide_console().status("") as status:
        for one in grid(rows, vocabulary, repeats, slope, apart):
            cells.append(one)
            status.update("{vocabulary} tokens, {rows} rows, {rule}".format_map(one))
    facts = {"repeats": repeats, "slope": slope, "apart": apart}
    report([table(cells, rows)], facts, output, cells=cells)


if __name__ == "__main__":
    typer.run(main)
