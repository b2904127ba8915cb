"""Our heads, quantized folders and proposers in vLLM's CPU build (``make peers``), on the bundled target.

    python benchmarks/in_vllm.py heads --prompts humaneval.jsonl --output heads.json
    python benchmarks/in_vllm.py heads --heads dspark=HEAD --heads peagle=HEAD
    python benchmarks/in_vllm.py folders --scheme int8 --scheme int4-g64 --output folders.json
    python benchmarks/in_vllm.py proposers --output proposers.json

heads: do heads that were trained here have the same acceptance there? They are converted with `foretoken convert --to
vllm`; tokens per pass of greedy chains are compared on the same prompts. Greedy texts in bf16 diverge after some
tokens, so the figures differ slightly. Block drafters draft their whole block, which vLLM would compute shorter
otherwise. vLLM runs DSpark's kernels on CPUs in Triton's interpreter, a second a pass. Our MTP layers load in vLLM only
beside a Qwen3.5 target, so they are skipped.

folders: does vLLM load what `foretoken quantize` writes, and continue prompts as we do? Both round activations, each in
its own way, so greedy texts part where two tokens are nearly equal; bf16, where nothing is quantized, shows how often.

proposers: do ours change its greedy text, and how many tokens per pass do they give? In float32, on functions to
complete, and on the same after their own text, to be repeated. In bf16 (`--dtype bfloat16`) vLLM's own passes over one
row and over several round differently, so texts may diverge with any proposer.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from foretoken import zoo
from foretoken.audit.equality import first_difference
from foretoken.bench.output import cores, listing, progress, report
from foretoken.bench.peers.protocol import Answer, PeerRequest, Setup
from foretoken.bench.peers.registry import OURS
from foretoken.bench.peers.worker import PeerError, PeerWorker, start
from foretoken.bench.workloads import encoded_prompts
from foretoken.cli.checkpoints import convert
from foretoken.cli.plan import OURS as OUR_CLASS
from foretoken.models.formats.checkpoint import load_config, load_tokenizer
from foretoken.plan.vllm import Bench, VllmCandidate
from foretoken.quantize import quantize_checkpoint
from options import Output, Prompts, Small, target_path
from servers import need_vllm

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
BF16 = "bf16"
ROLES = ("eagle3", "peagle", "dflash", "dspark", "medusa")
METHODS = ("suffix", "recycling", "prediction", "mixture")
HEADS = {
    "heads": "{heads}",
    "depth": "{depth}",
    "foretoken tokens/pass": "{ours:.2f}",
    "vLLM tokens/pass": "{vllm:.2f}",
    "ratio": "{ratio:.3f}",
}
FOLDERS = {
    "weights": "{scheme}",
    "texts": "{texts}",
    "equal": "{equal}",
    "mean equal tokens": "{agreed:.1f}",
    "error": "{error}",
}
PROPOSERS = {
    "proposer": "{method}",
    "prompts": "{kind}",
    "equal": "{equal} of {texts}",
    "tokens/pass": "{tokens_per_pass:.2f}",
    "step / plain": "{step_over_plain:.2f}",
    "speedup": "{speedup:.2f}x",
}
_AT_ONCE = (("parallel_drafting", "true"),)
Ids = list[int]


def encoded(target: Path, prompts: Path | None, count: int) -> tuple[Any, list[Ids]]:
    """Returns the target's tokenizer, and prompts as its token ids."""
    tokenizer = load_tokenizer(target)
    return tokenizer, encoded_prompts(tokenizer, prompts, count)


def one_by_one(setup: Setup, prompts: Sequence[Ids], max_tokens: int, depth: int = 0) -> list[Answer]:
    """Returns a system's greedy answer to each prompt. Raises PeerError if the system cannot load its models."""
    with closing(start(setup)) as worker:
        asked = progress(prompts, f"{setup.system} {setup.method}")
        return [worker.answer(PeerRequest([ids], max_tokens, depth=depth)) for ids in asked]


def heads_of(given: list[str]) -> dict[str, Path]:
    """Returns folders of heads by their kind: those given as KIND=FOLDER, or the bundled ones."""
    if not given:
        return {model.role: zoo.path(model.role) for model in zoo.list_models() if model.role in ROLES}
    named = dict(each.partition("=")[::2] for each in given)
    if other := sorted(set(named) - set(ROLES)):
        raise typer.BadParameter(f"{other[0]!r} is no kind of heads; known: {', '.join(ROLES)}")
    return {role: Path(path).expanduser().absolute() for role, path in named.items()}


def compared(role: str, heads: Path, prompts: list[Ids], max_tokens: int, depth: int, scratch: Path) -> dict[str, Any]:
    """Returns tokens per pass of heads in both engines, without first passes, which have no draft in either."""
    target, converted = zoo.path("target"), scratch / role
    convert(heads, converted, to="vllm", target=str(target), force=True)
    block = load_config(heads).get("block_size")
    depth = depth if block is None else block - (role == "dflash")
    method, options = ("eagle3", _AT_ONCE) if role == "peagle" else (role, ())
    chain = (("method", json.dumps(method)), ("top_k", "1"))
    ours = Setup(OURS.name, method, str(target), str(heads), threads=cores(), options=chain)
    theirs = Setup("vllm", method, str(target), str(converted), depth=depth, threads=cores(), options=options)
    both = [one_by_one(setup, prompts, max_tokens, depth) for setup in (ours, theirs)]
    own, other = (sum(a.total - 1 for a in answers) / sum(a.passes - 1 for a in answers) for answers in both)
    return {"heads": role, "depth": depth, "ours": own, "vllm": other, "ratio": other / own}


@app.command()
def heads(
    heads: Annotated[list[str] | None, typer.Option(help="KIND=FOLDER, repeatable. [the bundled ones]")] = None,
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1)] = 24,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    depth: Annotated[int, typer.Option(min=1)] = 4,
    output: Output = None,
) -> None:
    """Compares mean acceptance lengths of the same heads here and in vLLM; exit code 1 if they differ by over 5 %."""
    need_vllm()
    _, ids = encoded(zoo.path("target"), prompts, count)
    with tempfile.TemporaryDirectory() as scratch:
        given = heads_of(heads or []).items()
        rows = [compared(role, path, ids, max_tokens, depth, Path(scratch)) for role, path in given]
    report([listing(HEADS, rows)], {"max_tokens": max_tokens}, output, rows=rows)
    raise typer.Exit(any(abs(row["ratio"] - 1) > 0.05 for row in rows))


@app.command()
def folders(
    scheme: Annotated[list[str], typer.Option(help="May be repeated.")] = ["int8", "int4-g32", "int4-g64", "int4-g128"],
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    small: Small = False,
    output: Output = None,
) -> None:
    """Prints a row for each folder; exits with 1 if vLLM cannot load one."""
    need_vllm()
    source, rows = target_path(None, small), list[dict[str, Any]]()
    _, prompts = encoded(source, None, count)
    for name in [BF16, *scheme]:
        with tempfile.TemporaryDirectory() as temporary:
            place = source if name == BF16 else Path(temporary) / name
            if name != BF16:
                quantize_checkpoint(str(source), place, name)
            systems = [Setup(system, "plain", str(place), threads=cores()) for system in (OURS.name, "vllm")]
            try:
                ours, theirs = (one_by_one(each, prompts, max_tokens) for each in systems)
            except PeerError as error:
                rows.append({"scheme": name, "error": str(error).strip().splitlines()[-1]})
                continue
        pairs = [(a.tokens[0], b.tokens[0]) for a, b in zip(ours, theirs, strict=True)]
        lengths = [max_tokens if (at := first_difference(*pair)) is None else at for pair in pairs]
        row = {"scheme": name, "texts": len(prompts), "equal": lengths.count(max_tokens), "agreed": fmean(lengths)}
        rows.append(row)
    report([listing(FOLDERS, rows)], {"target": source.name, "max_tokens": max_tokens}, output, rows=rows)
    raise typer.Exit(any("error" in row for row in rows))


def ask_all(
    asked: PeerWorker, prompts: Sequence[Ids], depth: int, max_tokens: int, batch: int, what: str
) -> list[Answer]:
    """Completes all prompts after a warm-up request, whose text is not kept in any store."""
    asked.answer(PeerRequest([prompts[0]], 8, depth=depth))
    asked.answer(PeerRequest([], 0, depth=depth))
    groups = [list(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
    return [asked.answer(PeerRequest(group, max_tokens, depth=depth)) for group in progress(groups, what)]


def texts(answers: Sequence[Answer]) -> list[Ids]:
    return [text for answer in answers for text in answer.tokens]


def result(method: str, kind: str, plain: Sequence[Answer], own: Sequence[Answer]) -> dict[str, Any]:
    """Returns the result of one method beside plain decoding. equal: equal texts. step_over_plain: of step times."""
    equal = sum(a == b for a, b in zip(texts(plain), texts(own), strict=True))
    rate = sum(len(text) - 1 for text in texts(own)) / sum(passes for answer in own for passes in answer.passes_each)
    steps, plain_steps = (fmean(each for answer in a for each in answer.step_seconds) for a in (own, plain))
    row = {"method": method, "kind": kind, "equal": equal, "texts": len(texts(own)), "tokens_per_pass": rate}
    return row | {"step_over_plain": steps / plain_steps, "speedup": rate * plain_steps / steps}


@app.command()
def proposers(
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(min=8)] = 96,
    depth: Annotated[int, typer.Option(min=1)] = 8,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option()] = "float32",
    python: Annotated[Path | None, typer.Option(help="Of vLLM's environment.")] = None,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")] = "{}",
    output: Output = None,
) -> None:
    """Compares texts and tokens per pass; the exit code is 1 if a text differs."""
    target = zoo.path("target")
    tokenizer, write = encoded(target, prompts, count)
    engine = {"dtype": dtype} | json.loads(engine_args)
    bench = Bench(target=str(target), max_tokens=max_tokens, batches=(batch,), python=python, engine=engine)
    with closing(bench.start(None)) as process:
        written = texts(ask_all(process, write, 0, 2 * max_tokens, 1, "plain, the functions"))
        gap = list(tokenizer.encode("\n\n\n", add_special_tokens=False))
        asked = {"write": write, "rewrite": [p + w + gap + p for p, w in zip(write, written, strict=True)]}
        plain = {kind: ask_all(process, ids, 0, max_tokens, batch, f"plain {kind}") for kind, ids in asked.items()}
    rows = []
    for method in METHODS:
        config = {"method": "custom_class", "model": OUR_CLASS, "num_speculative_tokens": depth}
        lane = VllmCandidate.of(config, method, {"foretoken": {"method": method}})
        with closing(bench.start(lane)) as process:
            for kind, ids in asked.items():
                own = ask_all(process, ids, depth, max_tokens, batch, f"{method} {kind}")
                rows.append(result(method, kind, plain[kind], own))
    facts = {"target": target.name, "dtype": dtype, "depth": depth, "max_tokens": max_tokens, "batch": batch}
    report([listing(PROPOSERS, rows)], facts, output, rows=rows)
    raise typer.Exit(any(each["equal"] < each["texts"] for each in rows))


if __name__ == "__main__":
    app()
