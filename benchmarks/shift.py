"""Online adaptation under a shift of the text: library code first, then other text, with and without ``adapt``.

    python benchmarks/shift.py --to tests --output shift.json

The same prompts in the same order go through two engines that differ only in ``adapt``. Requests have seeds, so the
texts are the same and only the drafts differ. "tests" are the standard library's own tests, "prose" its docstrings;
both are missing or rare in the bundled draft's training data.
"""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken import LLM, SamplingParams
from foretoken.bench.output import listing, progress, report
from foretoken.propose.adaptive import Adaptive
from foretoken.train.data import standard_library
from options import Output

PROMPT_CHARACTERS = 400
COLUMNS = {
    "block": "{block}",
    "text": "{text}",
    "acceptance": "{acceptance_static:.3f}",
    "acceptance, adapting": "{acceptance_adapting:.3f}",
    "tokens/pass": "{length_static:.2f}",
    "tokens/pass, adapting": "{length_adapting:.2f}",
}


def pieces(texts: Iterator[str], count: int) -> list[str]:
    """Returns the beginnings of ``count`` passages of text."""
    passages: list[str] = []
    for text in texts:
        starts = range(0, len(text) - 4 * PROMPT_CHARACTERS, 4 * PROMPT_CHARACTERS)
        passages.extend(text[at : at + PROMPT_CHARACTERS] for at in starts)
    step = max(1, len(passages) // count)
    return passages[::step][:count]


def library_tests() -> Iterator[str]:
    """Yields the sources of the standard library's tests."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "test"
    for file in sorted(folder.glob("test_*.py")):
        yield file.read_text(encoding="utf-8", errors="ignore")


def prose() -> Iterator[str]:
    """Yields the docstrings of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8", errors="ignore"))
        strings = [
            ast.get_docstring(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        yield "\n\n".join(text for text in strings if text)


def run(llm: LLM, prompts: list[str], max_tokens: int, first_seed: int) -> tuple[float, float]:
    """Completes the prompts. Returns the share of accepted draft tokens, and tokens per step."""
    params = [SamplingParams(max_tokens=max_tokens, seed=first_seed + i, ignore_eos=True) for i in range(len(prompts))]
    stats = [output.stats for output in llm.generate(prompts, params, use_tqdm=False)]
    if isinstance(llm.engine.proposer, Adaptive):
        llm.engine.proposer.wait()
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    return accepted / drafted, sum(s.tokens for s in stats) / sum(s.steps for s in stats)


def main(
    to: Annotated[str, typer.Option(help="tests or prose.")] = "tests",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of requests of each kind of text.")] = 6,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a block.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1)] = 96,
    output: Output = None,
) -> None:
    """Compares a fixed draft with one that adapts."""
    sources = {"tests": library_tests, "prose": prose}
    if to not in sources:
        raise typer.BadParameter(f"{to!r} is not known; known: {', '.join(sources)}")
    library = pieces(iter(standard_library().held_out), blocks * requests)
    other = pieces(sources[to](), blocks * requests)
    fixed = {"control": "fixed"}
    static, adapting = LLM(speculative_config=fixed), LLM(speculative_config=fixed, adapt=True)
    steps = [
        (kind, prompts[i : i + requests])
        for kind, prompts in (("library", library), (to, other))
        for i in range(0, len(prompts), requests)
    ]
    measured: list[dict[str, Any]] = []
    for number, (kind, prompts) in enumerate(progress(steps, "shift")):
        before, after = (run(llm, prompts, max_tokens, 1000 * number) for llm in (static, adapting))
        block = {"block": number + 1, "text": kind, "acceptance_static": before[0], "acceptance_adapting": after[0]}
        measured.append(block | {"length_static": before[1], "length_adapting": after[1]})
    proposer = adapting.engine.proposer
    assert isinstance(proposer, Adaptive)
    history = proposer.history
    said = f"{len(history)} updates, {sum(not update.taken for update in history)} rolled back"
    updates = [asdict(update) for update in history]
    report([listing(COLUMNS, measured), said], {"to": to}, output, blocks=measured, updates=updates)


if __name__ == "__main__":
    typer.run(main)
