"""``foretoken demo``: the same functions completed plainly and speculatively, side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.bench.workloads import FUNCTIONS
from foretoken.cli.options import Json, TextColor
from foretoken.cli.theme import ColorMode, console

if TYPE_CHECKING:
    from foretoken.bench.measure import TimedCompletion
    from foretoken.cli.lanes import Stage
    from foretoken.llm import LLM


@dataclass(frozen=True)
class Race:
    """Settings of the race. ``size`` is the size that the bundled target is widened to, or None."""

    size: str | None
    prompts: int
    max_tokens: int
    temperature: float
    speculative_tokens: int


@dataclass(frozen=True)
class Pair:
    """The two runs over one prompt."""

    plain: TimedCompletion
    speculative: TimedCompletion

    @property
    def identical(self) -> bool:
        """Whether both texts are equal."""
        return self.plain.output.token_ids == self.speculative.output.token_ids


def demo(
    size: Annotated[str, typer.Option(help="Size to widen the bundled target to, such as 0.7b; none: as it is.")] = (
        "0.7b"
    ),
    prompts: Annotated[int, typer.Option(min=1, max=len(FUNCTIONS), help="Functions to complete.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    speculative_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted per step.")] = 4,
    color: TextColor = ColorMode.AUTO,
    as_json: Json = False,
) -> None:
    """Watch the bundled pair complete Python functions plainly and speculatively."""
    from foretoken.cli.lanes import stage

    race = Race(None if size.lower() == "none" else size, prompts, max_tokens, temperature, speculative_tokens)
    show = stage(console(color, stderr=as_json), quiet=as_json)
    pairs = run_race(race, show)
    record = summarize(race, pairs)
    if as_json:
        print(json.dumps(record))
    else:
        show.result(record)
    if not record["identical"]:
        raise typer.Exit(1)


def run_race(race: Race, show: Stage) -> list[Pair]:
    """Completes every function in both lanes, plain first, and returns both results of each."""
    llm = _load(race, show)
    try:
        for tokens in (0, race.speculative_tokens):  # warms up both lanes
            llm.generate(FUNCTIONS[0], _params(race, tokens, max_tokens=8))
        chosen = FUNCTIONS[: race.prompts]
        return [_pair(llm, race, show, prompt, i, len(chosen)) for i, prompt in enumerate(chosen)]
    finally:
        llm.close()


def _load(race: Race, show: Stage) -> LLM:
    from foretoken import zoo

    target, draft = zoo.path("target"), zoo.path("draft")
    if race.size is not None:
        from foretoken.train.widen.checkpoint import scaled

        size = race.size.upper()
        show.say(
            f"The bundled target, widened to {size} without changing what it computes: it behaves like the small model "
            f"it is and costs what a {size} model costs. Built once, then kept."
        )
        target = scaled(race.size)
    with show.status("loading the pair"):
        from foretoken import LLM

        return LLM(model=str(target), draft_model=str(draft))


def _params(race: Race, speculative_tokens: int, max_tokens: int | None = None) -> Any:
    """Returns the parameters of both lanes. The seed makes sampled texts equal (trajectory grade)."""
    from foretoken import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens or race.max_tokens,
        temperature=race.temperature,
        seed=0,
        ignore_eos=True,
        speculative_tokens=speculative_tokens,
    )


def _pair(llm: LLM, race: Race, show: Stage, prompt: str, index: int, count: int) -> Pair:
    from foretoken.bench.measure import timed
    from foretoken.cli.render import Origins

    with show.race(prompt, index, count, race.max_tokens) as lanes:
        runs = []
        for lane, tokens in zip(lanes, (0, race.speculative_tokens), strict=True):
            lane.begin(Origins(llm.tokenizer, llm.tokenizer.encode(prompt)))
            runs.append(timed(llm, prompt, _params(race, tokens), lane.push))
            lane.end(runs[-1])
    return Pair(*runs)


def summarize(race: Race, pairs: list[Pair]) -> dict[str, Any]:
    """Returns totals over all prompts. Rates are total tokens over total seconds, prefill included."""
    from foretoken.bench.measure import Totals

    plain = Totals.of(pair.plain for pair in pairs)
    fast = Totals.of(pair.speculative for pair in pairs)
    return {
        "target": f"bundled, widened to {race.size}" if race.size else "bundled",
        "prompts": len(pairs),
        "max_tokens": race.max_tokens,
        "temperature": race.temperature,
        "speculative_tokens": race.speculative_tokens,
        "plain": {"tokens": plain.tokens, "seconds": plain.seconds, "tokens_per_second": plain.tokens_per_second},
        "speculative": {
            "tokens": fast.tokens,
            "seconds": fast.seconds,
            "tokens_per_second": fast.tokens_per_second,
            "mean_acceptance_length": fast.mean_acceptance_length,
        },
        "speedup": fast.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0,
        "identical": all(pair.identical for pair in pairs),
    }
