"""Options that several scripts have, and the models and prompts that they name."""

import ast
import random
from collections.abc import Container, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any

import typer

from foretoken import zoo
from foretoken.bench.workloads import load_prompts
from foretoken.models.formats.checkpoint import resolve
from foretoken.train.data import standard_library
from foretoken.train.widen.checkpoint import scaled
from real_models import REAL_MODELS, real_model_path

_SHORTEST, _LONGEST = 80, 1200  # characters of a prompt
_BODY = 3  # lines after its docstring, at least: there is something to write

Target = Annotated[Path | None, typer.Option(help="A checkpoint. [the bundled target, widened to 0.7 B]")]
Small = Annotated[bool, typer.Option("--small", help="The bundled target as it is, not widened.")]
Draft = Annotated[Path | None, typer.Option(help="The draft model. [the bundled one]")]
Prompts = Annotated[Path | None, typer.Option(help='JSON lines with a "prompt" each. [our own functions]')]
SomePrompts = Annotated[
    Path | None, typer.Option("--prompts", help='JSON lines with a "prompt" each. [functions of the standard library]')
]
"""Those of ``some_prompts``."""
Temperatures = Annotated[list[float], typer.Option(min=0.0, help="May be repeated.")]
Rows = Annotated[list[int], typer.Option(min=1, help="Rows of a pass; may be repeated.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns of everything that is timed.")]
Repeats = Annotated[int, typer.Option(min=1, help="Turns of everything that is compared.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write setting and results to this file as JSON.")]
Config = dict[str, Any]
"""A speculative_config, in which the model "draft" stands for the pair's draft."""
MODEL_HELP = f"A folder, a GGUF file, or one of: {', '.join(REAL_MODELS)}."


def target_path(target: Path | None, small: bool = False) -> Path:
    """Returns the target's folder: the named one, or the bundled one, widened unless ``small``."""
    return target or (zoo.path("target") if small else scaled())


def model_path(name: str) -> Path:
    """Returns the folder or file of a model, which may be a real one by its short name."""
    return real_model_path(name) if name in REAL_MODELS else resolve(Path(name))


def with_models(config: Config, draft: Path | None = None, heads: Container[str] = ()) -> Config:
    """Returns a configuration with the path of a draft, by default the bundled one, and of the bundled ``heads``."""
    method, draft = config["method"], draft or zoo.path("draft")
    result: Config = {"model": str(zoo.path(method))} if method in heads else {}
    result |= {key: str(draft) if (key, value) == ("model", "draft") else value for key, value in config.items()}
    if "members" in config:
        result["members"] = [with_models(member, draft, heads) for member in config["members"]]
    return result


def label(config: Config) -> str:
    """Returns the method and the options that distinguish a configuration."""
    said = ("method", "model", "num_speculative_tokens", "members")
    return " ".join([str(config["method"]), *(f"{k}={v}" for k, v in config.items() if k not in said)])


def function_heads() -> list[str]:
    """Returns functions of the standard library up to the end of their docstrings, in one fixed random order.

    Judging predictions needs hundreds of prompts: two samples of 80 differ by six percent whatever the method. The
    bundled models were trained on this library: figures on it show how good a prediction is, not how fast other texts
    are.
    """
    corpus = standard_library()
    heads = sorted({head for text in (*corpus.held_out, *corpus.train) for head in _heads(text)})
    random.Random(0).shuffle(heads)
    return heads


def some_prompts(path: Path | None, count: int) -> list[str]:
    """Returns ``count`` prompts of a file, else our own, in random order because files may be sorted by kind."""
    if path is None:
        return function_heads()[:count]
    texts = load_prompts(path)
    random.Random(0).shuffle(texts)
    return texts[:count]


def _heads(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        end, last = node.body[0].end_lineno or 0, node.end_lineno or 0
        head = dedent("\n".join(lines[node.lineno - 1 : end])) + "\n"
        if last - end >= _BODY and _SHORTEST <= len(head) <= _LONGEST:
            yield head
