"""Is the text the same with every proposer, draft length and batch? Compares them with plain decoding.

Greedy decoding and the trajectory grade at temperature 1, in float32, bfloat16 and with int8 and int4 weights, or on
GGUF files of the bundled target. Where the runner is batch-invariant, texts must be equal byte for byte. Elsewhere each
difference is examined: does a tie explain it? ``--short`` tries every proposer in some minutes, for instance on each
instruction-set level that ``foretoken info`` lists: ``FORETOKEN_CPU=avx2 python benchmarks/exactness_grid.py --short``.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from foretoken import LLM, zoo
from foretoken.audit.equality import divergences_of
from foretoken.audit.implementations import Foretoken
from foretoken.audit.subject import AuditedCompletion, CompletionSettings, Ids
from foretoken.bench.output import cores, listing, report, wide_console
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.core.context import Exactness
from foretoken.core.native import build
from foretoken.core.sampling import SamplingLaw
from foretoken.models.options import QUANTIZATIONS
from options import Config, Output, Prompts, Temperatures, label, with_models

BATCHES = (1, 8)
PACKED = "packed"
DTYPES = ("float32", "bfloat16", PACKED, "int8", "int4")
PAIR: list[Config] = [{"method": "draft_model", "model": "draft"}, {"method": "ngram"}]
# Every proposer of the bundled family that needs no file of the user's.
ALL: list[Config] = [
    *PAIR,
    *({"method": "draft_model", "model": "draft", "tree": tree} for tree in ("top_k", "sampled", "greedy_multi")),
    {"method": "eagle3"},
    {"method": "eagle3", "top_k": 1},
    {"method": "mtp"},
    {"method": "medusa"},
    {"method": "blockwise"},
    {"method": "early_exit"},
    {"method": "self_quantized"},
    {"method": "vocabulary", "model": "draft"},
    {"method": "suffix"},
    {"method": "recycling"},
    {"method": "mixture", "members": [{"method": "eagle3"}, {"method": "suffix"}, {"method": "recycling"}]},
]
# Those of the bundled hybrid, whose checkpoint has an MTP layer.
HYBRID: list[Config] = [
    {"method": "mtp"},
    {"method": "mtp", "top_k": 1},
    *PAIR,
    {"method": "draft_model", "model": "draft", "tree": "sampled"},
    {"method": "early_exit"},
    {"method": "suffix"},
]
HEADS = ("eagle3", "mtp", "medusa", "blockwise")
COLUMNS = {
    "temperature": "{temperature:g}",
    "dtype": "{dtype}",
    "proposer": "{method}",
    "depth": "{depth}",
    "batch": "{batch}",
    "equal": "{equal}/{texts}",
    "ties": "{ties}",
    "bugs": "{bugs}",
}
Cell = dict[str, Any]
"""A proposer, draft length and batch, compared with plain decoding. promised: Whether all texts must be equal."""


def own_prompts(count: int) -> list[str]:
    """Returns ``count`` prompts: bundled functions cut after their second line, their third, and so on."""
    cut = ("\n".join(text.splitlines()[:lines]) for lines in range(2, 20) for text in FUNCTIONS)
    return list(dict.fromkeys(cut))[:count]


def load(kind: str, model: str = "target", **options: Any) -> Foretoken:
    """Loads a bundled model in a dtype or quantized by that name, or another checkpoint or GGUF file of it."""
    if not Path(kind).exists():
        if kind == PACKED:
            options |= {"dtype": "bfloat16", "weight_format": "packed"}
        elif kind in QUANTIZATIONS:
            options |= {"dtype": "bfloat16", "quantization": kind}
        else:
            options |= {"dtype": kind}
        kind = str(zoo.path(model))
    return Foretoken.of(LLM(kind, **options))


@dataclass(frozen=True)
class Course:
    """Plain texts of one dtype and temperature, with which its cells are compared."""

    kind: str  # a dtype, a quantization, or the path of a target
    prompts: Sequence[Ids]
    settings: CompletionSettings  # of the plain texts
    plain: Sequence[AuditedCompletion]

    def compare(self, engine: Foretoken, name: str, depth: int, batch: int) -> Cell:
        """Returns the cell of another way to complete the prompts."""
        settings = replace(self.settings, depth=depth, batch=batch)
        outputs = engine.generate(self.prompts, settings)
        reasons = [
            {"prompt": d.prompt, "position": d.position, "margin": d.margin, "delta": d.moved}
            | {"kind": "tie" if d.tie else "bug"}
            for d in divergences_of(engine, self.prompts, self.plain, outputs, settings)
        ]
        place = {"temperature": settings.law.temperature, "dtype": self.kind, "method": name}
        place |= {"depth": depth, "batch": batch, "equal": len(outputs) - len(reasons), "texts": len(outputs)}
        return place | {"promised": engine.bit_equal, "divergences": reasons}


def courses(
    kind: str, model: str, prompts: Sequence[str], max_tokens: int, temperatures: Sequence[float]
) -> tuple[list[Course], list[Cell]]:
    """Decodes plainly, one prompt at a time, each with a seed. Returns the texts, and the cells of batches.

    Packed weights are compared with plain decoding on raw ones.
    """
    engine = load(kind, model)
    reference = load("bfloat16", model, weight_format="raw") if kind == PACKED else engine
    ids, seeds = [reference.encode(text) for text in prompts], tuple(range(len(prompts)))
    result = []
    for temperature in temperatures:
        law = SamplingLaw(temperature=temperature)
        settings = CompletionSettings(law, max_tokens, seeds, depth=0, grade=Exactness.TRAJECTORY, batch=1)
        result.append(Course(kind, ids, settings, reference.generate(ids, settings)))
    return result, [course.compare(engine, "off", 0, BATCHES[-1]) for course in result]


def grid(plain: Sequence[Course], model: str, config: Config, depths: Sequence[int]) -> Iterator[Cell]:
    """Yields the cells of one configuration, at its own draft length or at all of them."""
    kind = plain[0].kind
    if config["method"] == "self_quantized" and (Path(kind).exists() or kind.startswith("int4")):
        return  # the target has few bits already
    heads = HEADS if Path(kind).exists() else ()  # a head is not found beside another file than the bundled target
    engine = load(kind, model, speculative_config=with_models(config, heads=heads))
    own = config.get("num_speculative_tokens")
    for course, depth, batch in product(plain, depths if own is None else [own], BATCHES):
        yield course.compare(engine, label(config), depth, batch)


def digest(course: Course) -> str:
    """Returns a short hash of the plain texts, which tells whether two machines or levels write the same."""
    tokens = json.dumps([list(each.tokens) for each in course.plain])
    return hashlib.sha256(tokens.encode()).hexdigest()[:8]


def level() -> str:
    """Returns the instruction-set level of the kernels, or that torch operators take their place."""
    try:
        return build.require().name
    except build.KernelsUnavailable:
        return "torch operators"


def table(cells: Sequence[Cell]) -> Table:
    rows = []
    for cell in cells:
        kinds = [divergence["kind"] for divergence in cell["divergences"]]
        counts = {"ties": kinds.count("tie"), "bugs": kinds.count("bug")}
        rows.append(cell | {"depth": cell["depth"] or None} | counts)
    return listing(COLUMNS, rows)


def main(
    prompts: Prompts = None,
    count: Annotated[int | None, typer.Option(min=1, help="Prompts. [50]")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="[64]")] = None,
    dtype: Annotated[list[str], typer.Option(help="Or packed, int8, int4; may be repeated.")] = list(DTYPES),
    depth: Annotated[list[int] | None, typer.Option(min=1, help="Drafted tokens; may be repeated. [1 4 8]")] = None,
    temperature: Temperatures = [0.0, 1.0],
    target: Annotated[
        list[Path] | None,
        typer.Option(exists=True, help="GGUF file or folder of the bundled target, in place of dtypes."),
    ] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="The bundled hybrid in place of the dense target.")] = False,
    config: Annotated[list[str] | None, typer.Option(help="JSON; may be repeated. [draft model and lookup]")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every proposer of the bundled family.")] = False,
    short: Annotated[
        bool, typer.Option("--short", help="Every proposer, 8 prompts, 24 tokens, draft length 4.")
    ] = False,
    output: Output = None,
) -> None:
    """Compares texts over proposers, draft lengths and batches; the exit code is 1 on a bug or a broken promise."""
    torch.set_num_threads(cores())
    usual = (8, 24, [4]) if short else (50, 64, [1, 4, 8])
    count, max_tokens, depth = count or usual[0], max_tokens or usual[1], depth or usual[2]
    texts = load_prompts(prompts, count) if prompts else own_prompts(count)
    model = "hybrid-target" if hybrid else "target"
    usual_configs = (HYBRID if hybrid else ALL) if every or short else PAIR
    configs = [json.loads(text) for text in config] if config else usual_configs
    cells: list[Cell] = []
    digests: dict[str, str] = {}
    for kind in map(str, target) if target else dtype:
        with wide_console().status(f"{kind}, plain decoding") as status:
            plain, own = courses(kind, model, texts, max_tokens, temperature)
            cells += own
            digests |= {
                f"{Path(kind).name}, temperature {each.settings.law.temperature:g}": digest(each) for each in plain
            }
            for each in configs:
                status.update(f"{kind}, {label(each)}")
                cells += grid(plain, model, each, depth)
    wrong = any(d["kind"] == "bug" or cell["promised"] for cell in cells for d in cell["divergences"])
    report(
        [
            table(cells),
            *(f"plain texts, {name}: {value}" for name, value in digests.items()),
            f"{sum(c['equal'] for c in cells)} of {sum(c['texts'] for c in cells)} texts are the plain ones",
        ],
        {"kernels": level(), "prompts": len(texts), "max_tokens": max_tokens},
        output,
        plain_texts=digests,
        cells=cells,
    )
    raise typer.Exit(wrong)


if __name__ == "__main__":
    typer.run(main)
