"""``foretoken bench costs``: what a pass costs, where a step's time goes, how long the first token takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken import zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import BenchmarkModels, ResultOptions, TargetFormats, WeightFormat, counts, names
from foretoken.cli.theme import note, on_terminal, waiting, wide_console
from foretoken.core.errors import WriteError

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.bench.costs import Loaded
    from foretoken.costs.measured import PassCost

PARTS = ("passes", "transformers", "steps", "startup")


@dataclass(frozen=True, kw_only=True)
class NumberFormats(TargetFormats):
    """Number formats of the target, by the names of the arguments of ``LLM``."""

    weight_format: WeightFormat = "raw"


@grouped
def costs(
    models: BenchmarkModels,
    rows: str = option("1,2,4,8,16,32", "Rows of a pass, comma-separated."),
    context: str = option("512,4096", "Tokens before them, comma-separated."),
    batch: int = option(1, "Sequences that share a pass, each with that many rows.", min=1),
    turns: int = option(20, "Passes of each kind, interleaved.", min=1),
    max_tokens: int = option(64, "Tokens of each prompt whose steps are measured.", min=2),
    *,
    formats: NumberFormats,
    parts: str = option(",".join(PARTS), "What to measure, comma-separated."),
    report: ResultOptions,
) -> None:
    """Time passes beside their lower bound and transformers' step, the parts of a step, and the first token."""
    from foretoken.bench.output import cores, setting
    from foretoken.train.widen.checkpoint import scaled

    chosen = names("part", parts, PARTS)
    sizes, contexts = counts("--rows", rows), counts("--context", context)
    import torch

    torch.set_num_threads(cores())
    bundled = [] if models.target else [zoo.path("target")]
    wide = models.target or scaled("0.7b")
    small = models.draft or (zoo.path("draft") if bundled else None)
    drafting: dict[str, Any] = {"draft_model": str(small)} if small else {"speculative_config": {"method": "recycling"}}
    notes = wide_console(report.color, stderr=True)
    record: dict[str, Any] = {
        "setting": setting() | {"target": wide.name, "draft": small.name if small else "recycling"}
    }
    shown: list[Any] = []
    options = {"model": str(wide), **vars(formats), **drafting}
    measures: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
        "passes": lambda: _passes(wide, formats, sizes, contexts, turns, batch, notes),
        "transformers": lambda: _transformers(
            [*([small] if small else []), *bundled, wide], min(contexts), turns, notes
        ),
        "steps": lambda: _steps(options, max_tokens, notes),
        "startup": lambda: _startup(wide.name, bool(bundled), options, min(3, turns), notes),
    }
    for part in chosen:
        record[part], tables = measures[part]()
        shown += tables

    report.write(record, lambda: shown, record["setting"])


def _passes(
    wide: Path,
    formats: NumberFormats,
    rows: Sequence[int],
    contexts: Sequence[int],
    turns: int,
    batch: int,
    notes: Console,
) -> tuple[Any, list[Any]]:
    from foretoken.bench.costs import Loaded, pass_costs
    from foretoken.bench.page import pass_table

    loaded = Loaded.of(wide, formats.quantization or "", formats.weight_format, formats.kv_cache_dtype)
    result = pass_costs(loaded, rows, contexts, turns, batch, tracker(notes, "passes"))
    _keep(loaded, result, notes)
    precision = loaded.quantization or str(loaded.model.dtype).removeprefix("torch.")
    title = f"\na pass of {wide.name}, {precision}, products read {loaded.weights_bytes / 1e6:.0f} MB"
    facts = [asdict(cost) | {"over_floor": cost.over_floor, "over_read": cost.over_read} for cost in result]
    return facts, [title + (f", batch {batch}" if batch > 1 else ""), pass_table(result)]


def _keep(loaded: Loaded, result: Sequence[PassCost], notes: Console) -> None:
    """Saves measured costs for plans of the same checkpoint on this machine."""
    from foretoken.bench.costs import known

    try:
        known(loaded).merged(result).save()
    except WriteError as error:
        note(notes, str(error), "yellow")


def _transformers(folders: Sequence[Path], context: int, turns: int, notes: Console) -> tuple[Any, list[Any]]:
    from foretoken.bench.costs import Loaded, step_cost
    from foretoken.bench.page import transformers_table

    result = [step_cost(Loaded.of(f), context, turns, tracker(notes, f"a step of {f.name}")) for f in folders]
    facts = [asdict(cost) | {"ratio": cost.ratio} for cost in result]
    return facts, ["\none step: one row through Model.score, and transformers' module", transformers_table(result)]


def _steps(options: dict[str, Any], max_tokens: int, notes: Console) -> tuple[Any, list[Any]]:
    """Measures steps on a few prompts after one that warms up, greedy and sampled."""
    from foretoken import LLM, SamplingParams
    from foretoken.bench.measure import step_times
    from foretoken.bench.page import part_table

    llm = LLM(**options)
    result = {}
    with waiting(notes, "steps"):
        for name, extra in {"temperature 0": {"temperature": 0.0}, "temperature 1": {}, "seeded": {"seed": 1}}.items():
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculative_tokens=4, **extra)  # type: ignore[arg-type]
            step_times(llm, FUNCTIONS[:1], params)
            result[name] = step_times(llm, FUNCTIONS[:4], params)
    facts = {name: asdict(r) | {"outside": r.outside, "per_step": r.per_step()} for name, r in result.items()}
    return facts, ["\nthe parts of a step at draft length 4, ms", part_table(result)]


def _startup(name: str, bundled: bool, options: dict[str, Any], times: int, notes: Console) -> tuple[Any, list[Any]]:
    from foretoken.bench.measure import startup
    from foretoken.bench.page import startup_table

    with waiting(notes, "starting fresh processes"):
        result = [startup("bundled pair", {}, times)] if bundled else []
        result.append(startup(name, options, times))
    return [asdict(each) for each in result], [
        "\nfrom nothing to the first token, a fresh process",
        startup_table(result),
    ]


def tracker(notes: Console, title: str) -> Callable[[Sequence[int]], Iterable[int]]:
    """Returns a wrapper of iterables that shows a progress bar; without a terminal it prints a line."""

    def shown(turns: Sequence[int]) -> Iterable[int]:
        if on_terminal(notes):
            from rich.progress import track

            return track(turns, title, console=notes)
        notes.print(f"{title}: {len(turns)} turns", markup=False)
        return turns

    return shown
