"""Error of ``foretoken plan --endpoint`` at draft lengths and concurrencies that the plan did not measure.

    python benchmarks/plan_endpoint.py --engine vllm --output plan_vllm.json
    python benchmarks/plan_endpoint.py --engine llamacpp --output plan_llamacpp.json
    python benchmarks/plan_endpoint.py --engine foretoken --output plan_foretoken.json

The plan is made at two draft lengths and a few concurrencies. Then the server runs at other draft lengths and
concurrencies beside plain decoding, and the measured speedups are compared with those of the plan. The prompts are the
same, so that the prediction is tested and not the difference between two samples of texts, which is several percent for
so few; ``--unseen`` takes others. A server that can choose the draft length for a request is measured as it is; others
are started once for each length, and what the longer draft length alone predicts is compared as well.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken import zoo
from foretoken.bench.output import listing, report, wide_console
from foretoken.plan.endpoint import EndpointPlan, PlannedEndpoint, ServerPair, plan_endpoint
from foretoken.plan.endpoint.statistics import SpeedModel
from options import Output, Target, some_prompts, target_path
from predictions import COLUMNS, accuracy, accuracy_words, prediction
from servers import engine_serving, listed_model

console = wide_console()


Records = list[dict[str, Any]]  # of ``prediction``, with the draft lengths of the plan, draft length and concurrency


@dataclass(frozen=True)
class PlanRun:
    """Settings that all plans of one engine share. points: the seconds and tokens of passes that each run measured."""

    prompts: Sequence[str]
    compared: Sequence[str]
    concurrency: tuple[int, ...]
    others: tuple[int, ...]
    max_tokens: int
    temperature: float
    rounds: int
    points: list[dict[str, Any]] = field(default_factory=list)

    def plan(self, pair: ServerPair, depth: int, earlier: Sequence[EndpointPlan] = ()) -> EndpointPlan:
        records = [each.to_dict() for each in earlier]
        return self._run(pair, depth, self.prompts, self.concurrency, records)

    def speedups(self, pair: ServerPair, depth: int) -> dict[tuple[int, int], float]:
        """Returns measured speedups by draft length and concurrency.

        Tokens per pass are those of all texts, as few texts are decoded one at a time.
        """
        rows = self._run(pair, depth, self.compared, self.others, []).rows
        return {(row.depth, row.concurrency): row.speedup or 0.0 for row in rows if row.measured}

    def _run(
        self,
        pair: ServerPair,
        depth: int,
        prompts: Sequence[str],
        concurrency: tuple[int, ...],
        earlier: Sequence[dict[str, Any]],
    ) -> EndpointPlan:
        lanes = 3 if pair.baseline is None else 2
        made = plan_endpoint(
            PlannedEndpoint(
                pair,
                depth,
                self.temperature,
                concurrency,
                self.max_tokens,
                budget=self.rounds * lanes * sum(concurrency) * self.max_tokens,
                earlier=earlier,
            ),
            prompts,
        )
        if made.because:
            raise SystemExit(f"{pair.url}: cannot tell, because {made.because}")
        tokens = {row.depth: row.tokens_per_pass for row in made.rows if row.measured}
        self.points.append({"concurrency": concurrency, "tokens_per_pass": tokens, **(made.measured or {})})
        console.print(f"draft length {depth}: {made.facts['seconds']:.0f} s", *made.notes, style="dim")
        return made


def compared(plan: EndpointPlan, basis: str, measured: dict[tuple[int, int], float]) -> Records:
    """Returns the speedups of the plan beside the measured ones. basis: Draft lengths that it was made from."""
    if plan.predictor is None:
        return []
    rows = {at: plan.predictor.own(*at) for at in sorted(measured)}
    places = {at: {"basis": basis, "depth": at[0], "concurrency": at[1]} for at in rows}
    return [{**places[at], **prediction(row, measured[at])} for at, row in rows.items()]


def summary(pairs: Records) -> tuple[list[Table | str], dict[str, dict[str, float]]]:
    """Returns the table and the lines to print, and the figures by basis."""
    heads = {"planned from": "{basis}", "tokens": "{depth}", "at once": "{concurrency}"}
    parts: list[Table | str] = [listing(heads | COLUMNS, pairs)]
    facts = {}
    for basis in dict.fromkeys(each["basis"] for each in pairs):
        own = [each for each in pairs if each["basis"] == basis]
        facts[basis] = {"pairs": float(len(own)), **accuracy(own)}
        parts.append(f"planned from {basis}: {len(own)} pairs, {accuracy_words(facts[basis])}")
    return parts, facts


def _restarted(
    run: PlanRun, models: tuple[str, str, str], basis: Sequence[int], depths: Sequence[int]
) -> Iterator[Records]:
    """Compares for a server with one draft length: it is started once for each. Yields all pairs after each length."""
    engine, model, draft = models
    plans: list[EndpointPlan] = []
    measured: dict[tuple[int, int], float] = {}
    with engine_serving(engine, model, draft, 0) as baseline:
        for depth in dict.fromkeys((*basis, *depths)):
            with engine_serving(engine, model, draft, depth) as url:
                pair = ServerPair(url, listed_model(url), baseline)
                if depth in basis:
                    plans.append(run.plan(pair, depth, plans))
                    continue
                measured |= run.speedups(pair, depth)
            pairs = compared(plans[-1], " and ".join(map(str, basis)), measured)
            if len(basis) > 1:
                pairs += compared(_alone(plans[-1], basis[-1]), str(basis[-1]), measured)
            yield pairs


def _alone(plan: EndpointPlan, depth: int) -> EndpointPlan:
    """Returns the plan from one of its draft lengths."""
    if plan.predictor is None:
        return plan
    speeds = plan.predictor.speeds
    own = {at: each for at, each in speeds.speculative.items() if at[0] == depth}
    return replace(plan, predictor=replace(plan.predictor, speeds=SpeedModel(speeds.plain, own)))


def _switched(run: PlanRun, url: str, basis: Sequence[int], depths: Sequence[int]) -> Iterator[Records]:
    """Compares for a server that takes the draft length of a request. Yields all pairs at once."""
    pair = ServerPair(url, listed_model(url))
    plan, measured = run.plan(pair, basis[-1]), dict[tuple[int, int], float]()
    for depth in depths:
        if (depth, run.others[0]) not in measured:
            measured |= run.speedups(pair, depth)
    own = sorted({row.depth for row in plan.rows if row.measured})
    yield compared(plan, " and ".join(map(str, own)), measured)


def main(
    engine: Annotated[str, typer.Option(help="foretoken, vllm or llamacpp.")] = "foretoken",
    endpoint: Annotated[str | None, typer.Option(help="A server that runs already. [started here]")] = None,
    basis: Annotated[list[int], typer.Option(help="Draft lengths that the plan is made from.")] = [2, 6],
    depth: Annotated[list[int], typer.Option(help="Other draft lengths, to compare.")] = [4, 8],
    concurrency: Annotated[list[int], typer.Option(help="Requests at once in the plan.")] = [1, 4, 8],
    other: Annotated[list[int], typer.Option(help="Requests at once to compare.")] = [1, 2, 3, 6, 8],
    count: Annotated[int, typer.Option(help="Prompts of the plan.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Of every answer.")] = 48,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=4, help="Waves of every kind.")] = 5,
    unseen: Annotated[bool, typer.Option("--unseen", help="Compare on prompts that the plan has not seen.")] = False,
    target: Target = None,
    output: Output = None,
) -> None:
    """Plans, measures elsewhere, and compares."""
    started, texts = perf_counter(), some_prompts(None, 2 * count if unseen else count)
    run = PlanRun(texts[:count], texts[-count:], tuple(concurrency), tuple(other), max_tokens, temperature, rounds)
    model, draft = str(target_path(target)), str(zoo.path("draft"))
    with contextlib.ExitStack() as stack:
        if endpoint is not None:
            comparisons = _switched(run, endpoint, basis, depth)
        elif engine == "foretoken":
            comparisons = _switched(run, stack.enter_context(engine_serving(engine, model, draft, None)), [4], [3, 1])
        else:
            comparisons = _restarted(run, (engine, model, draft), sorted(basis), depth)
        for pairs in comparisons:
            parts, result = summary(pairs)
            facts = {"engine": engine, "target": Path(model).name, "seconds": round(perf_counter() - started)}
            report(parts, facts, output, summary=result, pairs=pairs, points=run.points)


if __name__ == "__main__":
    typer.run(main)
