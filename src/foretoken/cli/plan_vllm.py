"""``foretoken plan --engine vllm``: a plan for vLLM, measured on vLLM in its own environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.files import json_object, publish, write_text
from foretoken.cli.theme import ColorMode, staged, wide_console

if TYPE_CHECKING:
    from rich.text import Text

    from foretoken.plan.outcome import Plan
    from foretoken.plan.vllm.measured import VllmCandidate
    from foretoken.plan.vllm.runs import Bench

OURS = "foretoken.interop_vllm.VllmProposer"
_FREE: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("ngram", {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}, {}),
    ("suffix, recycling", {"method": "custom_class", "model": OURS}, {"foretoken": {"method": "mixture"}}),
)


def lanes(
    target: Path, drafts: Sequence[str], heads: Sequence[str], configs: Sequence[Mapping[str, Any]]
) -> list[VllmCandidate]:
    """Returns the candidates: drafts, heads in vLLM's format, methods without a model, and ``configs`` of vLLM.

    A configuration may hold "additional_config" beside vLLM's keys. Raises InvalidRequest or ModelLoadError.
    """
    from foretoken.core.errors import InvalidRequest
    from foretoken.models.formats.checkpoint import resolve
    from foretoken.plan.vllm.measured import VllmCandidate

    result = [VllmCandidate.of({"method": "draft_model", "model": str(resolve(draft))}) for draft in drafts]
    result += [_head(resolve(head), target) for head in heads]
    result += [VllmCandidate.of(config, name, additional) for name, config, additional in _FREE]
    for given in configs:
        own = dict(given)
        additional = own.pop("additional_config", {})
        details = [json.dumps(value) for value in additional.values()]
        result.append(
            VllmCandidate.of(own, " ".join([str(own.get("method")), str(own.get("model", "")), *details]), additional)
        )
    if len({lane.name for lane in result}) < len(result):
        raise InvalidRequest("two of the ways to speculate are the same; leave one of them out")
    return result


def _head(folder: Path, target: Path) -> VllmCandidate:
    """Returns a head, written once into the cache for vLLM. Raises InvalidRequest for heads that vLLM does not load."""
    from foretoken import zoo
    from foretoken.cli.convert import convert
    from foretoken.core.errors import InvalidRequest
    from foretoken.models.formats.checkpoint import load_config
    from foretoken.models.heads.block import read_block
    from foretoken.plan.candidates import CHAIN, head_method
    from foretoken.plan.vllm.measured import VllmCandidate

    method = head_method(folder)
    blocks = method in ("dflash", "dspark")
    if not blocks and method not in ("eagle3", "eagle", "medusa"):
        raise InvalidRequest(f"{folder} holds {method} heads, which vLLM does not load; leave them out")
    out = zoo.cache_folder() / "vllm" / f"{folder.name}-for-{target.name}"
    with redirect_stdout(sys.stderr):
        convert(folder, out, to="vllm", target=str(target), force=True)
    # one head, or one row of a block, per position bounds the draft length
    heads = load_config(out).get("num_heads") if method == "medusa" else None
    depth = read_block(out).depth if blocks else heads or CHAIN[-1]
    return VllmCandidate.of({"method": method, "model": str(out)}, f"{method} {folder.name}", max_depth=depth)


@dataclass(frozen=True)
class Options:
    """Options of the command line beside models and prompts."""

    engine: str
    python: Path | None
    arguments: str | None
    alone: bool
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    max_tokens: int
    top_p: float
    dtype: str
    quantization: str | None

    def bench(self, target: Path) -> Bench:
        """Returns the benchmark on vLLM. Raises InvalidRequest for options that do not apply to it."""
        from foretoken.core.errors import InvalidRequest
        from foretoken.plan.vllm.runs import Bench

        if self.engine != "vllm":
            raise InvalidRequest(f"--engine {self.engine!r}: expected foretoken, or vllm, to which --engine-* belong")
        if self.quantization is not None or self.top_p != 1.0:
            raise InvalidRequest(
                "--quantization and --top-p belong to Foretoken's own runtime; give vLLM its quantization in "
                "--engine-args"
            )
        arguments = json_object("--engine-args", self.arguments) if self.arguments is not None else {}
        given = {} if self.dtype == "auto" else {"dtype": self.dtype}
        return Bench(
            target=str(target),
            temperatures=self.temperatures,
            batches=self.batches,
            max_tokens=self.max_tokens,
            python=self.python,
            engine=given | arguments,
            alone=self.alone,
        )


def plan_for(
    options: Options,
    models: tuple[str, Sequence[str], Sequence[str]],
    configs: Sequence[str],
    texts: tuple[Path | None, int],
    files: tuple[bool, Path | None, Path | None],
    color: ColorMode,
) -> None:
    """Measures, predicts and prints.

    Args:
        options: The command line beside models and prompts.
        models: Target, drafts, heads.
        configs: Further ways to speculate, as JSON.
        texts: File of prompts and their number.
        files: Values of --json, --output and --html.
        color: Colours in tables.
    """
    from foretoken.bench.setting import setting
    from foretoken.bench.workloads import FUNCTIONS, load_prompts
    from foretoken.models.formats.checkpoint import load_tokenizer, resolve
    from foretoken.plan.render import rendered
    from foretoken.plan.vllm.planning import record, vllm_plan
    from foretoken.plan.vllm.runs import runs

    target = resolve(models[0])
    bench = options.bench(target)
    bench.command()  # raises before heads are written if vLLM is missing
    chosen = lanes(target, models[1], models[2], [json_object("--speculative-config", text) for text in configs])
    file, count = texts
    prompts = load_prompts(file, count) if file is not None else list(FUNCTIONS)[:count]
    tokenizer = load_tokenizer(target)
    ids = [list(tokenizer(text, verbose=False)["input_ids"]) for text in prompts]
    notes = wide_console(color, stderr=True)
    with staged(notes) as say:
        measured = runs(
            bench,
            chosen,
            ids,
            say,
            refused=lambda lane, error: notes.print(
                f"{error}; planned without it", style="yellow", markup=False, soft_wrap=True
            ),
        )
    facts = setting() | {"engine": "vllm", "target": target.name, "max_tokens": bench.max_tokens}
    source = f"{len(prompts)} of {file.name if file is not None else 'our own functions'}"
    result = vllm_plan(chosen, measured, setting=facts, prompts=source)
    console = wide_console(color)

    def show() -> None:
        for part in rendered(result, lambda plan: _pastes(plan, chosen)):
            console.print(part, soft_wrap=not hasattr(part, "columns"))
        console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim", markup=False)

    as_json, output, html_file = files
    whole = record(result, chosen, measured)
    publish(whole, show, as_json, output)
    if html_file is not None:
        from foretoken.report.plan import page

        write_text(html_file, page(whole))


def _pastes(plan: Plan, known: Sequence[VllmCandidate]) -> Iterator[Text]:
    from rich.text import Text

    from foretoken.plan.vllm.planning import chosen

    if plan.best is None:
        yield Text("\nover everything asked about: do not speculate", style="bold yellow")
        return
    additional = chosen(plan, known).additional
    yield Text("\nover everything asked about, paste", style="bold")
    yield Text(f"vLLM  speculative_config={json.dumps(plan.best)}")
    if additional:
        yield Text(f"      additional_config={json.dumps(additional)}")
