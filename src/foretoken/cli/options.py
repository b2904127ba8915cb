"""What several commands share: the options that say which model and how, and its loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.theme import ColorMode, console, waiting

if TYPE_CHECKING:
    from foretoken.llm import LLM

Target = Annotated[str | None, typer.Option(help="Target model: a folder or hub name. [bundled target]")]
DraftModel = Annotated[str | None, typer.Option(help="Draft model: a folder or hub name.")]
Speculation = Annotated[str | None, typer.Option(metavar="JSON", help='For instance \'{"method": "ngram"}\'.')]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quantization = Annotated[
    str | None, typer.Option(help="int8: the target's weights in 8 bits, and what they multiply. [as stored]")
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and output together.")]


def load(model: str | None, draft_model: str | None, color: ColorMode, **options: Any) -> LLM:
    """The model and what ``options`` of ``LLM`` say, with a spinner on standard error."""
    with waiting(console(color, stderr=True), f"loading {model or 'the bundled pair'}"):
        from foretoken import LLM

        return LLM(model, draft_model, **options)
