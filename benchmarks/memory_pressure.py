"""Memory runs short while long contexts are served: do drafts shrink, does any request fail, do drafts grow again?

    python benchmarks/memory_pressure.py --output memory_pressure.json

The bundled pair completes a batch of long prompts under a limit on its address space, as ``ulimit -v`` sets it. After a
third of the steps another part of the process allocates nearly all that is left, and frees it after another third. An
allocation beyond the limit would fail. The texts must equal those of an undisturbed run.
"""

import mmap
import resource
from collections import defaultdict
from collections.abc import Iterator
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
from systems import System, Workload

PHASES = ("before", "short of memory", "after")
LEFT = 0.4  # share of the threshold of low memory that stays free


def prompts(count: int, length: int, llm: LLM) -> list[list[int]]:
    """Returns token ids: the bundled functions concatenated, each prompt starting with another one."""
    texts = ("\n\n".join(FUNCTIONS[i:] + FUNCTIONS[:i]) for i in range(count))
    return [(list(llm.tokenizer(text)["input_ids"]) * 64)[:length] for text in texts]


def decoded(system: System) -> Iterator[float]:
    """Runs all steps. Yields, after each that generates tokens, the mean number of draft tokens of a sequence."""
    while system.engine.busy:
        step = system.advance(1)
        if step.passes:
            yield step.drafted / step.passes


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
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    system, work = System(llm), Workload("", prompts(batch, length, llm), params)
    system.add(work)
    third = len(list(decoded(system))) // 3
    expected, free, ballast, taken = system.texts, FreeMemory(torch.device("cpu")), list[mmap.mmap](), 0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limit = used + headroom * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    drafts: dict[str, list[float]] = defaultdict(list)
    halvings: dict[str, list[int]] = defaultdict(list)
    system.add(work)
    for number, nodes in enumerate(decoded(system)):
        memory = free()
        assert memory is not None
        if number == third:
            taken = memory.free - int(LEFT * memory.low)
            ballast.append(mmap.mmap(-1, taken))
        if number == 2 * third:
            ballast.pop().close()
        phase = PHASES[min(2, number // third)]
        drafts[phase].append(nodes)
        halvings[phase].append(watch.halvings)
    phases = [{"phase": p, "drafted": drafts[p], "halvings": halvings[p]} for p in PHASES]
    heads = ("", "steps", "drafted per step and sequence", "in its last 20")
    table = figures(heads, [(p, len(d), f"{fmean(d):.1f}", f"{fmean(d[-20:]):.1f}") for p, d in drafts.items()])
    equal = sum(a == b for a, b in zip(system.texts, expected, strict=True))
    said = f"{equal} of {batch} texts as without a limit; {taken / 2**20:,.0f} MiB were taken meanwhile"
    facts = {"batch": batch, "length": length, "tokens": tokens, "depth": depth, "headroom_mib": headroom}
    report([table, said], facts, output, equal=equal, phases=phases)
    raise typer.Exit(int(equal < batch))


if __name__ == "__main__":
    typer.run(main)
