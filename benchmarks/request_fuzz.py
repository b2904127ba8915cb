"""Random requests, drafted and plain: is every output the same?

Each request gets random sampling parameters. Plain decoding, one request at a time, is the reference. The same requests
then go through an engine that speculates, in crowded batches with a bounded KV cache (so that requests are preempted),
prefix caching, chunked prefill, random arrivals, priorities and aborts. Requests are greedy or seeded, so tokens, text,
finish reason, log-probabilities and errors must be equal byte for byte; an aborted request must be a prefix.

    python benchmarks/request_fuzz.py --pairs 100000
    python benchmarks/request_fuzz.py --model smollm2 --model gemma3 --pairs 1000 --output after.json

The digests of plain outputs are equal in another version (``PYTHONPATH=../before/src``) if its outputs are.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.output import report, wide_console
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.errors import InvalidRequest
from foretoken.engine.requests import Assembler, Request
from foretoken.models.options import QUANTIZATIONS
from foretoken.train.data import Corpus, train_tokenizer
from foretoken.train.shapes import LlamaShape
from foretoken.train.target import new_model, save
from options import MODEL_HELP, Config, Output, label, model_path, with_models

CONTEXT = 256  # max_model_len of every engine
SHAPE = LlamaShape(64, 96, 3, 4, 2, 16, 512)  # of the tiny pair
BATCH = 24  # requests that are compared together
TINY: list[Config] = [
    {"method": "draft_model", "model": "draft"},
    {"method": "draft_model", "model": "draft", "draft_stop": "entropy"},
    *({"method": "draft_model", "model": "draft", "tree": tree} for tree in ("top_k", "sampled", "greedy_multi")),
    {"method": "draft_model", "model": "draft", "control": "goodput"},
    {"method": "early_exit", "exit_layer": 1},
    {"method": "vocabulary", "model": "draft"},
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "recycling"},
    {"method": "prediction"},
    {"method": "auto", "model": "draft"},
    {
        "method": "mixture",
        "members": [
            {"method": "draft_model", "model": "draft"},
            {"method": "suffix"},
            {"method": "recycling"},
            {"method": "prediction"},
        ],
    },
]
MODEL_FREE: list[Config] = [{"method": "ngram"}, {"method": "suffix"}, {"method": "recycling"}]
BUNDLED: list[Config] = [
    {"method": "eagle3"},
    {"method": "eagle3", "tree": "top_k"},
    {"method": "mtp"},
    {"method": "medusa"},
    {"method": "blockwise"},
]
TEXT = (
    *FUNCTIONS,
    "class Ünïcode:\n    '''日本語 emoji 🙂🙃 größe 5 €'''\n\tx = 1\n",
    '{"name": "a", "size": [1, 2]}\n',
)


@dataclass(frozen=True)
class Case:
    """One request. abort_after: decode steps of the engine after which it is aborted, None for never."""

    prompt: str | list[int]
    params: dict[str, Any]
    priority: int = 0
    arrives: int = 0
    abort_after: int | None = None


@dataclass
class Outcome:
    """Result of one completion. error: set if it or its request failed. aborted: whether it was aborted."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    final: tuple[Any, ...] | None = None
    logprobs: list[Any] = field(default_factory=list)
    error: str | None = None
    aborted: bool = False
    drafted: int = field(default=0, compare=False)
    accepted: int = field(default=0, compare=False)

    def agrees(self, plain: Outcome) -> bool:
        """Returns whether it equals plain decoding's result, or for an aborted request a prefix of it."""
        if self.aborted:
            return plain.tokens[: len(self.tokens)] == self.tokens and plain.text.startswith(self.text)
        return self == plain


class Pair:
    """A folder with a tiny random target and its draft: the target with noise, so that the two often agree."""

    def __init__(self, folder: Path, shape: LlamaShape = SHAPE) -> None:
        tokenizer = train_tokenizer(Corpus("fuzz", TEXT * 3, TEXT), vocab_size=400)
        self.target, self.draft = folder / "target", folder / "draft"
        for path, noise in ((self.target, 0.0), (self.draft, 0.4)):
            model = new_model(shape, tokenizer, seed=1)
            generator = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for parameter in model.parameters():
                    spread = parameter.std() if parameter.ndim > 1 else torch.tensor(0.0)
                    parameter.mul_(3).add_(noise * spread * torch.randn(parameter.shape, generator=generator))
            save(model, tokenizer, path)


def random_params(rng: random.Random, text: str, vocabulary: int) -> dict[str, Any]:
    """Returns random sampling parameters for one request; each is omitted about half of the time."""

    def some(options: Sequence[Any], chance: float = 0.3) -> Any:
        return rng.choice(options) if rng.random() < chance else None

    def piece() -> str:
        start = rng.randrange(len(text))
        return text[start : start + rng.randint(1, 6)].strip() or "x"

    def token() -> int:
        return rng.randrange(vocabulary)

    max_tokens = rng.choice([1, 2, 5, 9, 14, 20, 45])
    structured = [
        {"regex": r"[a-z ]{1,12}(\d+|x)"},
        {"choice": ["zq7", "no", "yes, please", "größe"]},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"grammar": 'root ::= ("ab" | "c")+ "."'},
    ]
    wanted = some(structured, 0.15)
    words = [piece() for _ in range(rng.randint(1, 8))] if rng.random() < 0.25 else None
    if rng.random() < 0.08:  # every token that the grammar allows is forbidden
        wanted, words = {"choice": ["zq7", "größe", "no 7"]}, ["7", "q7", "zq7", "ß", "öß", "ße"]
    chosen = {
        "temperature": rng.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.7]),
        "seed": rng.randrange(2**40),
        "max_tokens": max_tokens,
        "min_tokens": some([0, 1, 3, 6], 0.3),
        "n": some([2, 3], 0.15),
        "top_p": some([0.1, 0.5, 0.9, 0.99]),
        "top_k": some([1, 2, 7, 50, 10_000]),
        "min_p": some([0.01, 0.1, 0.5]),
        "presence_penalty": some([-1.0, 0.5, 2.0]),
        "frequency_penalty": some([-0.5, 0.7, 2.0]),
        "repetition_penalty": some([0.8, 1.1, 1.5]),
        "logit_bias": {token(): rng.uniform(-8, 8) for _ in range(rng.randint(1, 5))} if rng.random() < 0.2 else None,
        "bad_words": words,
        "stop": [piece() for _ in range(rng.randint(1, 3))] if rng.random() < 0.35 else None,
        "stop_token_ids": [token() for _ in range(rng.randint(1, 20))] if rng.random() < 0.2 else None,
        "include_stop_str_in_output": some([True]),
        "ignore_eos": some([True]) if wanted is None else None,
        "skip_special_tokens": some([False]),
        "logprobs": some([0, 1, 5]),
        "prompt_logprobs": some([0, 2], 0.1),
        "structured_outputs": wanted,
        "speculative_tokens": some([1, 2, 3, 5, 8], 0.6),
        "explain": some([True]),
        "cache_salt": some(["a", "b"], 0.2),
        "prediction": some([text[:80], piece() * 4], 0.3),
    }
    chosen["min_tokens"] = None if chosen["min_tokens"] is None else min(chosen["min_tokens"], max_tokens)
    if chosen["seed"] % 5 == 0 and chosen["temperature"] == 0.0:
        chosen["seed"] = None  # a greedy request without a seed has the distribution grade
    return {key: value for key, value in chosen.items() if value is not None}


def random_case(rng: random.Random, vocabulary: int) -> Case:
    """Returns a random request; prompts often share a prefix with others."""
    text = rng.choice(TEXT)
    prompt: str | list[int] = text[: rng.randint(1, min(len(text), 260))]
    if rng.random() < 0.2:
        shared = random.Random(rng.randrange(3))
        prompt = [shared.randrange(vocabulary) for _ in range(rng.choice([64, 96, 130]))]
        prompt += [rng.randrange(vocabulary) for _ in range(rng.randint(0, 9))]
    return Case(
        prompt=prompt,
        params=random_params(rng, text, vocabulary),
        priority=rng.choice([0, 0, 0, 1, -1]),
        arrives=rng.choice([0, 0, 1, 3, 8]),
        abort_after=rng.randint(0, 12) if rng.random() < 0.08 else None,
    )


def run(llm: LLM, cases: Sequence[Case]) -> list[list[Outcome]]:
    """Returns the outcome of every completion of every case, all of them in one engine."""
    assembler, engine = Assembler(llm.engine, llm.tokenizer), llm.engine
    outcomes: dict[int, list[Outcome]] = {}
    waiting: dict[int, tuple[Case, Request | None]] = {}
    queue = sorted(enumerate(cases), key=lambda each: each[1].arrives)
    owners: dict[int, Outcome] = {}
    steps = 0
    while queue or engine.busy:
        while queue and (queue[0][1].arrives <= steps or not engine.busy):
            number, case = queue.pop(0)
            outcomes[number] = [Outcome() for _ in range(case.params.get("n", 1))]
            try:
                request, contexts = llm.requests.build(case.prompt, SamplingParams(**case.params))
                for context in contexts:
                    engine.check(context)
            except InvalidRequest as error:
                for outcome in outcomes[number]:
                    outcome.error = str(error)
                continue
            owners.update(zip(request.members, outcomes[number], strict=True))
            waiting[number] = case, request
            assembler.add(request, contexts, case.priority)
        for number, (case, sent) in list(waiting.items()):
            if sent is not None and case.abort_after is not None and steps >= case.arrives + case.abort_after:
                abort(llm, assembler, sent, owners)
                del waiting[number]
        for step in engine.step():
            note(assembler, step, owners)
        steps += 1
    engine.check_integrity()
    return [outcomes[number] for number in range(len(cases))]


def abort(llm: LLM, assembler: Assembler, request: Request, owners: dict[int, Outcome]) -> None:
    """Drops the completions of ``request`` that are not finished."""
    for member in request.members:
        if owners[member].final is None and owners[member].error is None:
            owners[member].aborted = True
        llm.engine.abort(member)
        llm.engine.finished.pop(member, None)
    assembler.forget(request)


def note(assembler: Assembler, step: Any, owners: dict[int, Outcome]) -> None:
    """Adds the emitted tokens of a step to the outcome of its sequence."""
    outcome = owners[step.sequence]
    if assembler.owner(step.sequence) is None:
        return
    try:
        piece = assembler.piece(step)
    except InvalidRequest as error:
        outcome.error = str(error)
        return
    outcome.drafted += len(step.draft)
    outcome.accepted += step.accepted
    outcome.tokens += piece.token_ids
    outcome.text += piece.text
    outcome.logprobs += piece.logprobs or ()
    if piece.output is not None:
        output = piece.output
        outcome.final = (output.text, output.token_ids, output.finish_reason, output.stop_reason, piece.prompt_logprobs)
        assert outcome.text == output.text, f"streamed {outcome.text!r}, final {output.text!r}"


@dataclass
class Arena:
    """One target with its plain engine and the speculative ones."""

    name: str
    plain: LLM
    drafted: dict[str, LLM]
    outputs: Any = field(default_factory=hashlib.sha256)  # digest of the plain outputs

    @staticmethod
    def open(name: str, target: Path, draft: Path, configs: Sequence[Config], kind: str) -> Arena:
        """Loads the engines. kind: a dtype, "auto" for the model's own, or "int8" or "int4" for bfloat16 with such
        weights.
        """
        quantized = kind in QUANTIZATIONS
        options: dict[str, Any] = {"dtype": "bfloat16" if quantized else kind, "max_model_len": CONTEXT}
        options["quantization"] = kind if quantized else None
        plain = LLM(target, speculative_config={"method": "none"}, max_num_seqs=1, **options)
        tokens = CONTEXT + 64
        drafted: dict[str, LLM] = {}
        for number, config in enumerate(configs):
            options |= {"speculative_config": with_models(config, draft), "max_num_seqs": (6, 3, 9)[number % 3]}
            with closing(LLM(target, **options)) as unlimited:
                per_token = unlimited.target.kv_bytes_per_token + unlimited.engine.proposer.kv_bytes_per_token
            drafted[label(config)] = LLM(
                target,
                kv_cache_memory_bytes=tokens * per_token,
                enable_prefix_caching=True,
                max_num_batched_tokens=(16, None, 40)[number % 3],
                **options,
            )
        return Arena(name, plain, drafted)

    def compare(self, seed: int, engines: int, counts: dict[str, int]) -> Iterator[dict[str, Any] | None]:
        """Runs a batch of cases on ``engines`` of the speculative engines. Yields None for agreement, else a record."""
        rng = random.Random(seed)
        vocabulary = self.plain.target.vocab_size
        cases = [random_case(rng, vocabulary) for _ in range(BATCH)]
        alone = [run(self.plain, [replace(case, arrives=0, abort_after=None)])[0] for case in cases]
        self.outputs.update(repr(alone).encode())
        for name in rng.sample(sorted(self.drafted), min(engines, len(self.drafted))):
            self.drafted[name].engine.ahead = rng.random() < 0.5
            together = run(self.drafted[name], cases)
            for case, plain, other in zip(cases, alone, together, strict=True):
                counts["aborted"] += any(o.aborted for o in other)
                counts["failed"] += any(o.error is not None for o in other)
                counts["drafted"] += sum(o.drafted for o in other)
                counts["accepted"] += sum(o.accepted for o in other)
                same = len(plain) == len(other) and all(o.agrees(p) for p, o in zip(plain, other, strict=True))
                record = {
                    "seed": seed,
                    "pair": self.name,
                    "proposer": name,
                    "prompt": case.prompt,
                    "params": case.params,
                }
                record |= {"plain": [vars(o) for o in plain], "drafted": [vars(o) for o in other]}
                yield None if same else record


def main(
    pairs: Annotated[int, typer.Option(min=1, help="Comparisons of a drafted request with its plain one.")] = 2000,
    dtype: Annotated[list[str], typer.Option(help="By default float32 and int8, of --model its own.")] = [],
    seed: Annotated[int, typer.Option(help="The first batch's seed.")] = 0,
    heads: Annotated[bool, typer.Option(help="Also the bundled target's heads, one in eight.")] = True,
    model: Annotated[list[str], typer.Option(help=f"{MODEL_HELP} In place of the others; may be repeated.")] = [],
    output: Output = None,
) -> None:
    """Compares random requests with plain decoding, over all proposers; the exit code is 1 if any output differs."""
    torch.set_num_threads(1)
    console = wide_console()
    differences: list[dict[str, Any]] = []
    counts = dict.fromkeys(("pairs", "aborted", "failed", "drafted", "accepted", "preemptions", "prefix_hits"), 0)
    began, digests = time.monotonic(), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder))
        kinds = dtype or (["auto"] if model else ["float32", "int8"])
        for kind in kinds:
            paths = map(model_path, model)
            arenas = [Arena.open(path.name, path, pair.draft, MODEL_FREE, kind) for path in paths]
            if not model:
                arenas.append(Arena.open("tiny", pair.target, pair.draft, TINY, kind))
            if heads and not model:
                arenas.append(Arena.open("bundled", zoo.path("target"), zoo.path("draft"), BUNDLED, kind))
            share, done = pairs // len(kinds), 0
            batches = range(-(-share // (BATCH * 4)))
            for batch in track(batches, kind, console=console, transient=True):
                arena = arenas[batch % len(arenas)] if model else arenas[heads and batch % 8 == 7]
                for difference in arena.compare(seed + batch, engines=4, counts=counts):
                    done += 1
                    if difference is not None:
                        differences.append(difference | {"dtype": kind})
                        console.print(f"DIFFERENT: {json.dumps(differences[-1], default=str)[:2000]}", markup=False)
            counts["pairs"] += done
            digests |= {f"{arena.name}, {kind}": arena.outputs.hexdigest()[:12] for arena in arenas}
            for llm in (llm for arena in arenas for llm in arena.drafted.values()):
                counts["preemptions"] += llm.engine.usage.preemptions
                counts["prefix_hits"] += llm.engine.usage.prefix_hits
    facts = counts | {"differences": len(differences), "seconds": round(time.monotonic() - began)}
    said = [f"plain outputs of {name}: {digest}" for name, digest in digests.items()]
    report(said, facts, output, differences=differences, digests=digests)
    raise typer.Exit(1 if differences else 0)


if __name__ == "__main__":
    typer.run(main)
