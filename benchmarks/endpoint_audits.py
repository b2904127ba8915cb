"""Audits of servers and engines of others, each with a draft model beside the same without it; and false alarms.

    python benchmarks/endpoint_audits.py --engine foretoken --engine llamacpp --output audits.json
    python benchmarks/endpoint_audits.py --engine vllm --engine "vllm in process" --engine openvino
    python benchmarks/endpoint_audits.py --plain --engine foretoken --audits 20 --output alarms.json
    python benchmarks/endpoint_audits.py --plain --endpoint http://127.0.0.1:8001 --model NAME --audits 20

The target and the draft are the bundled ones, which the server or the engine computes in bfloat16. With ``--plain``
both sides of the audit are one server without speculation, so every check that fails is a false alarm. Every audit of a
server begins with other prompts. A second start with the same ``--output`` and options goes on where the first ended.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken import zoo
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.endpoint.engines import started
from foretoken.audit.subject import CheckOutcome
from foretoken.bench.output import figures, setting, wide_console
from foretoken.bench.workloads import FUNCTIONS
from foretoken.speculation import SpeculativeConfig
from servers import engine_serving, listed_model

ENGINES = {"vllm in process": "vllm", "openvino": "openvino"}
_TURN = 3  # prompts by which each audit begins later, so that greedy texts are others as well
Record = dict[str, Any]  # of an audit
console = wide_console()


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


def failing(audit: Record) -> bool:
    return any(check["outcome"] == CheckOutcome.FAILED for check in audit["checks"])


def evidence(audits: Sequence[Record]) -> Table:
    """Returns a table with a line for each check."""
    rows: list[tuple[str, ...]] = []
    for audit in audits:
        checks = (tuple(str(check[key]) for key in ("name", "outcome", "evidence")) for check in audit["checks"])
        rows += [(audit["engine"], *check) for check in checks]
        rows.append((audit["engine"], "", audit["outcome"].upper(), f"in {audit['seconds']:.0f} s"))
    return figures(("engine", "check", "verdict", "evidence"), rows)


def counts(audits: Sequence[Record]) -> Table:
    """Returns for each check how often each outcome was reached."""
    outcomes = [str(outcome) for outcome in CheckOutcome]
    seen: dict[str, Counter[str]] = {}
    for audit in audits:
        for check in audit["checks"]:
            seen.setdefault(check["name"], Counter())[check["outcome"]] += 1
    return figures(("check", *outcomes), ((name, *(each[o] or "" for o in outcomes)) for name, each in seen.items()))


def main(
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
                audit = audit_endpoint(subject, [*FUNCTIONS[first:], *FUNCTIONS[:first]])
                made.append({"engine": name} | audit.to_dict())
                console.print(f"{name}, audit {seed + 1}: {audit.outcome}, {audit.seconds:.0f} s", style="dim")
                if json_file is not None:
                    record = {"setting": setting(), **asked, "failed": sum(map(failing, made)), "audits": made}
                    json_file.write_text(json.dumps(record, indent=2, default=str) + "\n")
    console.print(counts(made) if plain else evidence(made))
    if plain:
        failed, expected = sum(map(failing, made)), len(made) * level
        console.print(f"{failed} of {len(made)} audits failed; at the level of {level:g}, {expected:.2g} are expected")


if __name__ == "__main__":
    typer.run(main)
