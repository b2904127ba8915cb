"""Memory runs short while long contexts are served: do drafts shrink, does any request fail, do drafts grow again?

    python benchmarks/memory_pressure.py --output memory_pressure.json

The bundled pair completes a batch of long prompts under a limit on its address space, as ``ulimit -v`` sets it. After a
third of the steps another part of the process allocates nearly all that is left, and frees it after another third. An
allocation beyond the limit would fail. The texts must equal those of an undisturbed run.
"""

import mmap
import resource
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer

from foretoken import LLM, SamplingParams
from foretoken.bench.output import cores, figures, report
from foretoken.bench.workloads import FUNCTIONS
from foretoken.control.fixed import Fixed
from foretoken.core.devices import FreeMemory
from options import Output

PHASES = ("before", "short of memory", "after")
LEFT = 0.4  # share of the threshold of low memory that stays free


class Balloon:
    """Allocates address space until ``left`` bytes of it are free."""

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None
        self.taken = 0

    def grow(self, free: int, left: int) -> None:
        """Allocates all but ``left`` of ``free`` bytes."""
        self.taken = (free - left) // mmap.PAGESIZE * mmap.PAGESIZE
        self._held = mmap.mmap(-1, self.taken)

    def burst(self) -> None:
        """Frees what was allocated."""
        if self._held is not None:
            self._held.close()
            self._held = None


def prompts(count: int, length: int, llm: LLM) -> list[list[int]]:
    """Returns token ids: the bundled functions concatenated, each prompt starting with another one."""
    texts = ("\n\n".join(FUNCTIONS[i:] + FUNCTIONS[:i]) for i in range(count))
    return [(list(llm.tokenizer(text)["input_ids"]) * 64)[:length] for text in texts]


def serve(llm: LLM, ids: list[list[int]], tokens: int, seen: Callable[[int, float], None]) -> list[tuple[int, ...]]:
    """Completes all prompts and returns their texts.

    seen: Called after every step with its number and the mean number of draft tokens.
    """
    params = [SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)] * len(ids)
    texts: dict[int, tuple[int, ...]] = {}
    steps, drafted = 0, list[int]()
    timings = None
    for piece in llm.stream(ids, params):
        if timings is not None and piece.step.timings is not timings:
            seen(steps, fmean(drafted))
            steps, drafted = steps + 1, []
        timings = piece.step.timings
        drafted.append(len(piece.step.draft))
        if piece.output is not None:
            texts[piece.request_id] = tuple(piece.output.token_ids)
    return [texts[request] for request in sorted(texts)]


def main(
    batch: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1500,
    tokens: Annotated[int, typer.Option(min=8, help="To write after each.")] = 1024,
    depth: Annotated[int, typer.Option(min=1, help="Tokens to draft.")] = 8,
    headroom: Annotated[
        int, typer.Option(min=1, help="MiB of address space beyond what is in use at the start.")
    ] = 2048,
    output: Output = None,
) -> None:
    """Prints draft tokens per step and sequence before, during and after the shortage; exits 1 if a text changed."""
    torch.set_num_threads(cores())
    llm = LLM(speculative_config={"method": "draft_model", "num_speculative_tokens": depth}, max_model_len=4096)
    controller = llm.engine.controller
    assert isinstance(controller, Fixed) and controller.memory is not None
    watch = controller.memory
    ids = prompts(batch, length, llm)
    before: list[float] = []
    expected = serve(llm, ids, tokens, lambda number, nodes: before.append(nodes))
    free, balloon = FreeMemory(torch.device("cpu")), Balloon()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limit = used + headroom * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    third = len(before) // 3
    drafts: dict[str, list[float]] = defaultdict(list)
    halvings: dict[str, list[int]] = defaultdict(list)

    def seen(number: int, nodes: float) -> None:
        memory = free()
        assert memory is not None
        if number == third:
            balloon.grow(memory.free, int(LEFT * memory.low))
        if number == 2 * third:
            balloon.burst()
        phase = PHASES[min(2, number // third)]
        drafts[phase].append(nodes)
        halvings[phase].append(watch.halvings)

    texts = serve(llm, ids, tokens, seen)
    phases = [{"phase": p, "drafted": drafts[p], "halvings": halvings[p]} for p in PHASES]
    heads = ("", "steps", "drafted per step and sequence", "in its last 20")
    table = figures(heads, [(p, len(d), f"{fmean(d):.1f}", f"{fmean(d[-20:]):.1f}") for p, d in drafts.items()])
    equal = sum(a == b for a, b in zip(texts, expected, strict=True))
    said = f"{equal} of {batch} texts as without a limit; {balloon.taken / 2**20:,.0f} MiB were taken meanwhile"
    facts = {"batch": batch, "length": length, "tokens": tokens, "depth": depth, "headroom_mib": headroom}
    report([table, said], facts, output, equal=equal, phases=phases)
    raise typer.Exit(int(equal < batch))


if __name__ == "__main__":
    typer.run(main)
