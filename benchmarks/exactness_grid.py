"""Is the text the same with every proposer, draft length and batch? Compares them with plain decoding.

Greedy decoding and the trajectory grade at temperature 1, in float32, bfloat16 and with int8 and int4 weights, or on
GGUF files of the bundled target. Where the runner is batch-invariant, texts must be equal byte for byte. Elsewhere each
difference is examined: does a tie explain it? ``--short`` tries every proposer in some minutes, for instance on each
instruction-set level that ``foretoken info`` lists: ``FORETOKEN_CPU=avx2 python benchmarks/exactness_grid.py --short``.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from foretoken import LLM, CompletionOutput, SamplingParams, zoo
from foretoken.bench.output import cores, figures, report, wide_console
from foretoken.bench.workloads import FUNCTIONS, load_prompts
from foretoken.core.draft import Draft
from foretoken.core.native import build
from foretoken.core.streams import SharedStream
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
PROBES = (0, 1, 4, 8)  # draft nodes of the passes that a row is compared over


@dataclass(frozen=True)
class Divergence:
    """The first token that differs, and whether two scores were so close that rounding can have swapped them.

    margin: difference between the best two scores (logits, or log p + noise). delta: largest change of any logit of
    that row over passes of other sizes. It is a tie if margin <= 2 delta, otherwise a bug.
    """

    prompt: int
    position: int
    margin: float
    delta: float

    @property
    def kind(self) -> str:
        """Returns "tie" or "bug"."""
        return "tie" if self.margin <= 2 * self.delta else "bug"


@dataclass(frozen=True)
class Cell:
    """Comparison of one proposer, draft length and batch with plain decoding."""

    temperature: float
    dtype: str
    method: str
    depth: int
    batch: int
    equal: int
    texts: int
    promised: bool  # the runner's rows are independent, so every text must be equal
    divergences: list[Divergence] = field(default_factory=list)


def own_prompts(count: int) -> list[str]:
    """Returns ``count`` prompts: bundled functions cut after their second line, their third, and so on."""
    cut = ("\n".join(text.splitlines()[:lines]) for lines in range(2, 20) for text in FUNCTIONS)
    return list(dict.fromkeys(cut))[:count]


def complete(
    llm: LLM, prompts: Sequence[str], depth: int, temperature: float, max_tokens: int, batch: int
) -> list[CompletionOutput]:
    """Completes each prompt with its own seed, ``batch`` of them at a time."""
    outputs: list[CompletionOutput] = []
    for start in range(0, len(prompts), batch):
        chosen = range(start, min(start + batch, len(prompts)))
        params = [
            SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True, speculative_tokens=depth
            )
            for i in chosen
        ]
        results = llm.generate([prompts[i] for i in chosen], params, use_tqdm=False)
        outputs += [result.outputs[0] for result in results]
    return outputs


def row_logits(llm: LLM, tokens: list[int], drafted: int) -> torch.Tensor:
    """Returns the logits [V] after ``tokens``, from a pass over one token and ``drafted`` draft nodes."""
    root = len(tokens) - 1 - drafted
    handle = llm.target.open(tokens[:root])
    try:
        with torch.inference_mode():
            llm.target.score([handle], [Draft.empty()])
            llm.target.commit([handle], [tokens[root : root + 1]])
            scores = llm.target.score([handle], [Draft.chain(tokens[root + 1 :])])
        return scores[0].logits[-1].double()
    finally:
        llm.target.close(handle)


def explain(
    llm: LLM, prompt: str, index: int, temperature: float, plain: Sequence[int], other: Sequence[int]
) -> Divergence:
    """Returns margin and delta at the token where two texts of one seed diverge."""
    position = next(
        (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other))
    )
    tokens = [*llm.tokenizer(prompt)["input_ids"], *plain[:position]]
    rows = [row_logits(llm, tokens, k) for k in PROBES if k + 1 < len(tokens)]
    delta = max(float((row - rows[0]).abs().max()) for row in rows)
    scores = rows[0]
    if temperature > 0:
        probs = (scores / temperature).softmax(-1)
        scores = SharedStream(index, position).race(probs, 0).log() * temperature
    best, second = scores.topk(2).values.tolist()
    return Divergence(index, position, best - second, delta)


def load(kind: str, model: str = "target", **options: Any) -> LLM:
    """Loads a bundled model in a dtype or quantized by that name, or another checkpoint or GGUF file of it."""
    if Path(kind).exists():
        return LLM(kind, **options)
    if kind == PACKED:
        return LLM(zoo.path(model), dtype="bfloat16", weight_format="packed", **options)
    if kind in QUANTIZATIONS:
        return LLM(zoo.path(model), dtype="bfloat16", quantization=kind, **options)
    return LLM(zoo.path(model), dtype=kind, **options)


@dataclass(frozen=True)
class Course:
    """Plain texts of one dtype and temperature, with which its cells are compared."""

    prompts: Sequence[str]
    max_tokens: int
    kind: str  # a dtype, a quantization, or the path of a target
    temperature: float
    plain: Sequence[CompletionOutput]

    def compare(self, llm: LLM, name: str, depth: int, batch: int) -> Cell:
        """Returns the cell of another way to complete the prompts."""
        outputs = complete(llm, self.prompts, depth, self.temperature, self.max_tokens, batch)
        reasons = [
            explain(llm, self.prompts[i], i, self.temperature, a.token_ids, b.token_ids)
            for i, (a, b) in enumerate(zip(self.plain, outputs, strict=True))
            if a.token_ids != b.token_ids
        ]
        equal, promised = len(outputs) - len(reasons), llm.target.batch_invariant
        return Cell(self.temperature, self.kind, name, depth, batch, equal, len(outputs), promised, reasons)


def courses(
    kind: str, model: str, prompts: Sequence[str], max_tokens: int, temperatures: Sequence[float]
) -> tuple[list[Course], list[Cell]]:
    """Decodes plainly, one prompt at a time. Returns the texts and the cells of plain decoding in a batch.

    Packed weights are compared with plain decoding on raw ones.
    """
    llm = load(kind, model)
    reference = load("bfloat16", model, weight_format="raw") if kind == PACKED else llm
    plain = [complete(reference, prompts, 0, value, max_tokens, batch=1) for value in temperatures]
    result = [Course(prompts, max_tokens, kind, *each) for each in zip(temperatures, plain, strict=True)]
    return result, [course.compare(llm, "off", 0, BATCHES[-1]) for course in result]


def grid(plain: Sequence[Course], model: str, config: Config, depths: Sequence[int]) -> Iterator[Cell]:
    """Yields the cells of one configuration, at its own draft length or at all of them."""
    kind = plain[0].kind
    if config["method"] == "self_quantized" and (Path(kind).exists() or kind.startswith("int4")):
        return  # the target has few bits already
    heads = HEADS if Path(kind).exists() else ()  # a head is not found beside another file than the bundled target
    llm = load(kind, model, speculative_config=with_models(config, heads=heads))
    own = config.get("num_speculative_tokens")
    for course, depth, batch in product(plain, depths if own is None else [own], BATCHES):
        yield course.compare(llm, label(config), depth, batch)


def digest(course: Course) -> str:
    """Returns a short hash of the plain texts, which tells whether two machines or levels write the same."""
    tokens = json.dumps([list(each.token_ids) for each in course.plain])
    return hashlib.sha256(tokens.encode()).hexdigest()[:8]


def level() -> str:
    """Returns the instruction-set level of the kernels, or that torch operators take their place."""
    try:
        return build.require().name
    except build.KernelsUnavailable:
        return "torch operators"


def table(cells: Sequence[Cell]) -> Table:
    rows = []
    for c in cells:
        kinds = [divergence.kind for divergence in c.divergences]
        place = f"{c.temperature:g}", c.dtype, c.method, c.depth or "", c.batch
        rows.append((*place, f"{c.equal}/{c.texts}", kinds.count("tie"), kinds.count("bug")))
    return figures(("temperature", "dtype", "proposer", "depth", "batch", "equal", "ties", "bugs"), rows)


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
            digests |= {f"{Path(kind).name}, temperature {each.temperature:g}": digest(each) for each in plain}
            for each in configs:
                status.update(f"{kind}, {label(each)}")
                cells += grid(plain, model, each, depth)
    wrong = [c for c in cells if any(d.kind == "bug" for d in c.divergences) or (c.promised and c.divergences)]
    report(
        [
            table(cells),
            *(f"plain texts, {name}: {value}" for name, value in digests.items()),
            f"{sum(c.equal for c in cells)} of {sum(c.texts for c in cells)} texts are the plain ones",
        ],
        {"kernels": level(), "prompts": len(texts), "max_tokens": max_tokens},
        output,
        plain_texts=digests,
        cells=[asdict(c) | {"divergences": [asdict(d) | {"kind": d.kind} for d in c.divergences]} for c in cells],
    )
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
