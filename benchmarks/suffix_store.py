"""The suffix store with many tokens: drafting time per step, bytes per token, the cost of insertion and eviction.

Requests are windows of Python's standard library with some tokens changed, in place of the outputs of a service that
generates similar texts repeatedly. They are added one by one; then others are drafted for as a target that generates
them would, and every draft is timed. The bound is below the total size, so that the oldest requests are evicted.
"""

import statistics
import time
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import track

from foretoken import zoo
from foretoken.bench.output import figures, memory, report
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.propose.suffix import Suffix, SuffixConfig
from foretoken.train.data import encode, standard_library
from options import Output


def requests(corpus: NDArray[np.int32], length: int, changed: float, seed: int, count: int) -> list[list[int]]:
    """Returns windows of the corpus in which a share of the tokens is replaced."""
    rng = np.random.default_rng(seed)
    windows = []
    for start in rng.integers(0, len(corpus) - length, count):
        window = corpus[start : start + length].copy()
        others = rng.random(length) < changed
        window[others] = rng.choice(corpus, int(others.sum()))
        windows.append(window.tolist())
    return windows


def accepted(draft: Draft, text: list[int]) -> int:
    """Returns the number of draft tokens that agree with ``text``."""
    node, depth = -1, 0
    while depth < len(text):
        child = next((c for c in draft.children[node + 1] if draft.ids[c] == text[depth]), None)
        if child is None:
            break
        node, depth = child, depth + 1
    return depth


def follow(
    proposer: Suffix, identifier: int, text: list[int], budget: int, prompt: int = 50
) -> list[tuple[float, int, int]]:
    """Drafts for a target that generates ``text``. Returns microseconds, emitted and drafted tokens of each step."""
    context = Context(identifier, text[:prompt], prompt, SamplingLaw(), Streams(0))
    steps = []
    while len(context.tokens) < len(text):
        started = time.perf_counter()
        draft = proposer.propose([context], [budget])[0]
        taken = (time.perf_counter() - started) * 1e6
        rest = text[len(context.tokens) :]
        emitted = rest[: accepted(draft, rest) + 1]
        context.tokens.extend(emitted)
        steps.append((taken, len(emitted), len(draft)))
    proposer.forget(context)
    return steps


def measure(tokens: int, bound: int, length: int, changed: float, follows: int, budget: int) -> dict[str, float]:
    """Fills a store and times drafts from it. Returns figures by name: microseconds unless the name says otherwise."""
    corpus = encode(standard_library().train, load_tokenizer(zoo.path("target"))).numpy().astype(np.int32)
    proposer = Suffix(SuffixConfig(suffix_decoding_max_cached_tokens=bound, suffix_decoding_max_cached_requests=2**30))
    store, busy, inline = proposer.store, 0.0, 0.0
    adds: list[float] = []
    for batch in track(range(-(-tokens // length // 500)), "filling"):
        outputs = requests(corpus, length, changed, batch, min(500, tokens // length - 500 * batch))
        began = time.process_time(), time.thread_time()
        for output in outputs:
            at = time.perf_counter()
            store.add(output)
            adds.append((time.perf_counter() - at) * 1e6)
            if len(store) > bound:
                raise RuntimeError(f"{len(store)} tokens are held; the bound is {bound}")
        store.settle()
        busy += time.process_time() - began[0]
        inline += time.thread_time() - began[1]
    texts = requests(corpus, length, changed, 10**6, follows)
    steps = [r for i, text in enumerate(track(texts, "following")) for r in follow(proposer, i, text, budget)]
    times = sorted(taken for taken, _, _ in steps)
    return {
        "inserted_tokens": len(adds) * length,
        "kept_tokens": len(store),
        "kept_requests": store.requests,
        "bound_tokens": bound,
        "bytes_per_token": store.nbytes / len(store),
        "parts": store.segments,
        "add_median": statistics.median(adds),
        "add_highest": max(adds),
        # processor time, like the next
        "add_per_token": inline * 1e6 / (len(adds) * length),
        "background_per_token": (busy - inline) * 1e6 / (len(adds) * length),
        "draft_median": times[len(times) // 2],
        "draft_p99": times[len(times) * 99 // 100],
        "draft_highest": times[-1],
        "tokens_per_step": statistics.fmean(emitted for _, emitted, _ in steps),
        "drafted_per_step": statistics.fmean(drafted for _, _, drafted in steps),
        "peak_memory_mib": memory("VmHWM") / 2**20,
    }


def main(
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens to insert.")] = 10_000_000,
    bound: Annotated[int, typer.Option(min=100, help="Tokens that the store may hold.")] = 8_000_000,
    length: Annotated[int, typer.Option(min=60, help="Tokens of a request.")] = 500,
    changed: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens that are changed.")] = 0.03,
    follows: Annotated[int, typer.Option(min=1, help="Requests that are followed and timed.")] = 50,
    budget: Annotated[int, typer.Option(min=1, help="Maximum number of draft tokens per step.")] = 16,
    output: Output = None,
) -> None:
    """Fills a suffix store and drafts from it."""
    store = measure(tokens, bound, length, changed, follows, budget)
    rows = [
        (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
        for name, value in store.items()
    ]
    facts = {"length": length, "changed": changed, "follows": follows, "budget": budget}
    report([figures(("figure", "value"), rows)], facts, output, figures=store)


if __name__ == "__main__":
    typer.run(main)
