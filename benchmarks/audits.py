"""Audits of every proposer, of transformers, and of servers and engines of others; and false alarms.

    python benchmarks/audits.py proposers --budget 120 --output audits.json
    python benchmarks/audits.py engines --engine foretoken --engine llamacpp --output engines.json
    python benchmarks/audits.py engines --engine vllm --engine "vllm in process" --engine openvino
    python benchmarks/audits.py engines --plain --engine foretoken --audits 20 --output alarms.json
    python benchmarks/audits.py engines --plain --endpoint http://127.0.0.1:8001 --model NAME --audits 20

Nothing here is a speed, so other work on the machine only reduces the power of the tests.

proposers: ``foretoken audit`` on each proposer of the bundled models and on transformers: the verdict, and the outcome
of every check. Budgets are seconds.

engines: each engine with a draft model beside the same without it. The target and the draft are the bundled ones, which
the server or the engine computes in bfloat16. With ``--plain`` both sides of the audit are one server without
speculation, so every check that fails is a false alarm. Every audit of a server begins with other prompts. A second
start with the same ``--output`` and options goes on where the first ended.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from exactness_grid import ALL
from foretoken import LLM, zoo
from foretoken.audit import CheckOutcome, audit
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.endpoint.engines import started
from foretoken.audit.implementations import Assisted
from foretoken.bench.output import cores, figures, progress, report, setting, wide_console
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.speculation import SpeculativeConfig
from options import Config, Output, Prompts, label, with_models
from servers import engine_serving, listed_model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
ASSISTED: list[Config] = [{"method": "draft_model", "model": "draft"}, {"method": "ngram"}]
SIGNS = {
    CheckOutcome.PASSED: "yes",
    CheckOutcome.FAILED: "NO",
    CheckOutcome.INCONCLUSIVE: "?",
    CheckOutcome.SKIPPED: "-",
}


ENGINES = {"vllm in process": "vllm", "openvino": "openvino"}
_TURN = 3  # prompts by which each audit begins later, so that greedy texts are others as well
Record = dict[str, Any]  # of an audit
console = wide_console()


@app.command()
def proposers(
    prompts: Prompts = None,
    config: Annotated[list[str] | None, typer.Option(help="JSON; may be repeated. [every proposer]")] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds for each.")] = 120.0,
    peers: Annotated[bool, typer.Option(help="transformers too, which may fail.")] = True,
    output: Output = None,
) -> None:
    """Runs all audits; the exit code is 1 if one of ours fails."""
    torch.set_num_threads(cores())
    texts = load_prompts(prompts) if prompts else None
    configs = [json.loads(text) for text in config] if config else ALL
    subjects: list[tuple[str, Any]] = [
        (label(each), lambda each=each: LLM(zoo.path("target"), speculative_config=with_models(each)))
        for each in configs
    ]
    if peers:
        subjects += [
            (
                f"transformers: {label(each)}",
                lambda each=each: Assisted(zoo.path("target"), SpeculativeConfig.of(with_models(each))),
            )
            for each in ASSISTED
        ]
    results = [(name, audit(make(), texts, budget=budget)) for name, make in progress(subjects, "audits")]
    doubtful = [
        f"{name}: {check.name} {check.outcome}: {check.evidence}"
        for name, result in results
        for check in result.checks
        if check.outcome in (CheckOutcome.FAILED, CheckOutcome.INCONCLUSIVE)
    ]
    rows = [{"proposer": name} | result.to_dict() for name, result in results]
    names = [check.name for check in results[0][1].checks]
    lines = [(name, *(SIGNS[check.outcome] for check in each.checks), str(each.outcome)) for name, each in results]
    report([figures(("proposer", *names, "verdict"), lines), *doubtful], {"budget": budget}, output, audits=rows)
    ours = [result for name, result in results if not name.startswith("transformers")]
    raise typer.Exit(int(any(result.outcome is CheckOutcome.FAILED for result in ours)))


@contextmanager
def running(engine: str, depth: int) -> Iterator[Endpoint]:
    """Runs a server or an engine with speculation and without. Yields what to audit."""
    target, draft = str(zoo.path("target")), str(zoo.path("draft"))
    if engine in ENGINES:
        method = SpeculativeConfig(method="draft_model", model=draft, num_speculative_tokens=depth)
        with started(ENGINES[engine], target, method) as pair:
            yield Endpoint(f"{pair.name} {pair.version}", target, checkpoint=pair.checkpoint, engines=pair)
    elif engine == "foretoken":  # a request can switch its speculation off
        with engine_serving(engine, target, draft, depth) as url:
            yield Endpoint(url, listed_model(url))
    else:
        with engine_serving(engine, target, draft, 0) as baseline, engine_serving(engine, target, draft, depth) as url:
            yield Endpoint(url, listed_model(url), baseline=baseline)


@contextmanager
def undrafted(engine: str, endpoint: str | None, model: str | None) -> Iterator[Endpoint]:
    """Runs a server without speculation, or takes the one at ``endpoint``. Yields it as both sides of an audit."""
    server = engine_serving(engine, str(zoo.path("target")), "", 0) if endpoint is None else nullcontext(endpoint)
    with server as url:
        yield Endpoint(url, model or listed_model(url), baseline=url)


def resumed(file: Path | None, asked: Record) -> list[Record]:
    """Returns the audits of an earlier run with the same options."""
    if file is None or not file.exists():
        return []
    record = json.loads(file.read_text())
    if differing := [name for name, value in asked.items() if record[name] != value]:
        raise typer.BadParameter(f"{file} was made with another {' and '.join(differing)}; choose another --output")
    return list(record["audits"])


def failing(made: Record) -> bool:
    return any(check["outcome"] == CheckOutcome.FAILED for check in made["checks"])


def evidence(audits: Sequence[Record]) -> Table:
    """Returns a table with a line for each check."""
    rows: list[tuple[str, ...]] = []
    for made in audits:
        checks = (tuple(str(check[key]) for key in ("name", "outcome", "evidence")) for check in made["checks"])
        rows += [(made["engine"], *check) for check in checks]
        rows.append((made["engine"], "", made["outcome"].upper(), f"in {made['seconds']:.0f} s"))
    return figures(("engine", "check", "verdict", "evidence"), rows)


def counts(audits: Sequence[Record]) -> Table:
    """Returns for each check how often each outcome was reached."""
    outcomes = [str(outcome) for outcome in CheckOutcome]
    seen: dict[str, Counter[str]] = {}
    for made in audits:
        for check in made["checks"]:
            seen.setdefault(check["name"], Counter())[check["outcome"]] += 1
    return figures(("check", *outcomes), ((name, *(each[o] or "" for o in outcomes)) for name, each in seen.items()))


@app.command()
def engines(
    engine: Annotated[
        list[str], typer.Option(help="foretoken, vllm, llamacpp, openvino, or vllm in process; may be repeated.")
    ] = ["foretoken"],
    plain: Annotated[bool, typer.Option("--plain", help="One server without speculation on both sides.")] = False,
    endpoint: Annotated[str | None, typer.Option(help="A plain server that runs already.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name for the model. [the first that it lists]")] = None,
    audits: Annotated[int, typer.Option(help="Number of audits of each engine.")] = 1,
    depth: Annotated[int, typer.Option(help="Draft length.")] = 4,
    budget: Annotated[int, typer.Option(help="Generated tokens of each.")] = 12_000,
    level: Annotated[float, typer.Option(help="Probability of failing an exact server, over all checks.")] = 0.01,
    minutes: Annotated[float, typer.Option(help="No audit begins later than that.")] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--output", help="Write the outcomes there; audits that it has are not repeated.")
    ] = None,
) -> None:
    """Audits one after the other, and prints what every check found, or how often each check failed."""
    end, asked = monotonic() + 60.0 * minutes, {"plain": plain, "depth": depth, "budget": budget, "level": level}
    made = resumed(json_file, asked)
    for name in engine:
        done = sum(audit["engine"] == name for audit in made)
        with undrafted(name, endpoint, model) if plain else running(name, depth) as pair:
            for seed in range(done, audits):
                if monotonic() > end:
                    break
                first = _TURN * seed % len(FUNCTIONS)
                subject = replace(pair, budget=budget, seed=seed, level=level)
                result = audit_endpoint(subject, [*FUNCTIONS[first:], *FUNCTIONS[:first]])
                made.append({"engine": name} | result.to_dict())
                console.print(f"{name}, audit {seed + 1}: {result.outcome}, {result.seconds:.0f} s", style="dim")
                if json_file is not None:
                    record = {"setting": setting(), **asked, "failed": sum(map(failing, made)), "audits": made}
                    json_file.write_text(json.dumps(record, indent=2, default=str) + "\n")
    console.print(counts(made) if plain else evidence(made))
    if plain:
        failed, expected = sum(map(failing, made)), len(made) * level
        console.print(f"{failed} of {len(made)} audits failed; at the level of {level:g}, {expected:.2g} are expected")


if __name__ == "__main__":
    app()
