"""Online adaptation under a shift of the text: library code first, then other text, with and without ``adapt``.

    python benchmarks/shift.py --to tests --output shift.json

The same prompts in the same order go through two engines that differ only in ``adapt``. Requests have seeds, so the
texts are the same and only the drafts differ. "tests" are the standard library's own tests, "prose" its docstrings;
both are missing or rare in the bundled draft's training data.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.propose.adaptive import Adaptive
from foretoken.train.data import standard_library

PROMPT_CHARACTERS = 400


@dataclass(frozen=True)
class Block:
    """Consecutive requests: the share of draft tokens that were accepted, and tokens per target pass."""

    text: str
    acceptance_static: float
    acceptance_adapting: float
    length_static: float
    length_adapting: float


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


def main() -> None:
    """Compares a fixed draft with one that adapts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", choices=("tests", "prose"), default="tests")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of requests of each kind of text")
    parser.add_argument("--requests", type=int, default=24, help="requests of a block")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    count = arguments.blocks * arguments.requests
    library = pieces(iter(standard_library().held_out), count)
    other = pieces(library_tests() if arguments.to == "tests" else prose(), count)
    fixed = {"control": "fixed"}
    static, adapting = LLM(speculative_config=fixed), LLM(speculative_config=fixed, adapt=True)
    blocks: list[Block] = []
    plan = [("library", library), (arguments.to, other)]
    steps = [
        (kind, prompts[i : i + arguments.requests])
        for kind, prompts in plan
        for i in range(0, len(prompts), arguments.requests)
    ]
    for number, (kind, prompts) in enumerate(track(steps, "shift", console=Console(stderr=True))):
        before, after = (run(llm, prompts, arguments.max_tokens, 1000 * number) for llm in (static, adapting))
        blocks.append(Block(kind, before[0], after[0], before[1], after[1]))
    table = Table("block", "text", "acceptance", "adapting", "tokens/pass", "adapting")
    for number, b in enumerate(blocks):
        table.add_row(
            str(number + 1),
            b.text,
            f"{b.acceptance_static:.3f}",
            f"{b.acceptance_adapting:.3f}",
            f"{b.length_static:.2f}",
            f"{b.length_adapting:.2f}",
        )
    Console().print(table)
    proposer = adapting.engine.proposer
    assert isinstance(proposer, Adaptive)
    history = proposer.history
    print(f"{len(history)} updates, {sum(not u.taken for u in history)} rolled back")
    if arguments.output:
        record = {"blocks": [asdict(b) for b in blocks], "updates": [asdict(u) for u in history]}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
