"""``foretoken demo``: the same functions completed plainly and speculatively, side by side."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from foretoken import zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import Json, TextColor
from foretoken.cli.theme import ColorMode, console

if TYPE_CHECKING:
    from foretoken.bench.measure import TimedCompletion
    from foretoken.cli.lanes import Stage
    from foretoken.llm import LLM


@dataclass(frozen=True)
class Race:
    """Settings of the race."""

    size: str | None = option("0.7b", "Size to widen the bundled target to, such as 0.7b; none: as it is.")
    prompts: int = option(4, "Functions to complete.", min=1, max=len(FUNCTIONS))
    max_tokens: int = option(96, "Tokens for each.", min=1)
    temperature: float = option(0.0, "0 is greedy.")
    speculative_tokens: int = option(4, "Tokens drafted per step.", min=1)

    def __post_init__(self) -> None:
        if self.size is not None and self.size.lower() == "none":
            object.__setattr__(self, "size", None)


@dataclass(frozen=True)
class Pair:
    """The two runs over one prompt."""

    plain: TimedCompletion
    speculative: TimedCompletion

    @property
    def identical(self) -> bool:
        """Whether both texts are equal."""
        return self.plain.output.token_ids == self.speculative.output.token_ids


@grouped
def demo(race: Race, color: TextColor = ColorMode.AUTO, as_json: Json = False) -> None:
    """Watch the bundled pair complete Python functions plainly and speculatively."""
    from foretoken.cli.lanes import stage

    show = stage(console(color, stderr=as_json), quiet=as_json)
    record = summarize(race, run_race(race, show))
    if as_json:
        print(json.dumps(record))
    else:
        show.result(record)
    if not record["identical"]:
        raise typer.Exit(1)


def run_race(race: Race, show: Stage) -> list[Pair]:
    """Completes every function in both lanes, plain first, and returns both results of each."""
    with closing(_load(race, show)) as llm:
        for tokens in (0, race.speculative_tokens):  # warms up both lanes
            llm.generate(FUNCTIONS[0], _params(race, tokens, max_tokens=8))
        return [_pair(llm, race, show, number) for number in range(race.prompts)]


def _load(race: Race, show: Stage) -> LLM:
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


def _pair(llm: LLM, race: Race, show: Stage, number: int) -> Pair:
    from foretoken.bench.measure import timed
    from foretoken.cli.render import Origins

    prompt, runs = FUNCTIONS[number], []
    with show.race(prompt, f"{number + 1} of {race.prompts}") as lanes:
        for lane, tokens in zip(lanes, (0, race.speculative_tokens), strict=True):
            lane.origins = Origins(llm.tokenizer, llm.tokenizer.encode(prompt))
            runs.append(timed(llm, prompt, _params(race, tokens), lane.push))
            lane.end(runs[-1])
    return Pair(*runs)


def summarize(race: Race, pairs: list[Pair]) -> dict[str, Any]:
    """Returns totals over all prompts. Rates are total tokens over total seconds, prefill included."""

    def figures(runs: list[TimedCompletion]) -> dict[str, Any]:
        tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
        return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds else 0.0}

    plain, fast = figures([pair.plain for pair in pairs]), figures([pair.speculative for pair in pairs])
    stats = [pair.speculative.output.stats for pair in pairs]
    drafts = sum(each.drafts for each in stats)
    length = 1.0 + sum(each.accepted for each in stats) / drafts if drafts else 1.0
    settings = vars(race) | {"prompts": len(pairs)}
    size = settings.pop("size")
    return {
        "target": f"bundled, widened to {size}" if size else "bundled",
        **settings,
        "plain": plain,
        "speculative": {**fast, "mean_acceptance_length": length},
        "speedup": fast["tokens_per_second"] / plain["tokens_per_second"] if plain["tokens_per_second"] else 0.0,
        "identical": all(pair.identical for pair in pairs),
    }
