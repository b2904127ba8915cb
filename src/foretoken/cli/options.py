"""Options that several commands share, and loading of the model."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.theme import ColorMode, console, waiting

if TYPE_CHECKING:
    from foretoken.llm import LLM

Target = Annotated[str | None, typer.Option(help="Target model: a folder, GGUF file or hub name. [bundled target]")]
DraftModel = Annotated[str | None, typer.Option(help="Draft model: a folder, GGUF file or hub name.")]
Speculation = Annotated[str | None, typer.Option(metavar="JSON", help='For instance \'{"method": "ngram"}\'.')]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Quantization = Annotated[
    str | None, typer.Option(help="int8 or int4: quantize the target's weights on loading. [as stored]")
]
WeightFormat = Annotated[
    str,
    typer.Option(
        help="raw; packed: bfloat16 weights in 12 bits of memory, without loss; auto: packed if few rows gain."
    ),
]
KVCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="auto; int8: twice as many cached tokens; bfloat16, of a float32 model.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write the JSON document to a file.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")]
Color = Annotated[ColorMode, typer.Option(help="Colours in tables.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and output together.")]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The same model served without speculation. [switched off per request]"),
]
ServerName = Annotated[
    str, typer.Option(help="Kind of the endpoint: auto, foretoken, vllm, llamacpp, sglang or openai.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="FORETOKEN_API_KEY", help="API key of the endpoint.")]
BaselineKey = Annotated[str | None, typer.Option(help="That of the baseline. [the same]")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for one answer of the endpoint.")]
Retries = Annotated[int, typer.Option(min=0, help="Further tries of a request to the endpoint.")]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel-size", help="Processes that share the target, under torchrun.")
]


def _check(
    dtype: str = "auto",
    quantization: str | None = None,
    weight_format: str = "raw",
    kv_cache_dtype: str = "auto",
    backend: str = "auto",
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    methods: Sequence[str | dict[str, Any]] = (),
    lora: Collection[str] = (),
    **others: Any,
) -> None:
    from foretoken.core.checks import integer
    from foretoken.models.options import (
        check_adapters,
        check_backend,
        check_dtype,
        check_kv_cache_dtype,
        check_quantization,
        check_weight_format,
    )
    from foretoken.propose.methods import check_method

    check_dtype(dtype)
    check_quantization(quantization)
    check_weight_format(weight_format)
    check_kv_cache_dtype(kv_cache_dtype)
    check_backend(backend)
    integer("max_model_len", max_model_len, 1, optional=True)
    integer("tensor_parallel_size", tensor_parallel_size, 1)
    check_adapters(lora, backend, tensor_parallel_size)
    for method in methods:
        if isinstance(method, str):
            check_method(method)


def following(tensor_parallel_size: int) -> bool:
    """Returns whether this process only computes its share of the first process's forward passes."""
    return tensor_parallel_size > 1 and os.environ.get("RANK", "0") != "0"


def load(model: str | None, draft_model: str | None, color: ColorMode, **options: Any) -> LLM:
    """Loads an ``LLM`` with ``options``, showing a spinner on standard error.

    Raises InvalidRequest. Wrong names and numbers are refused before anything heavy is imported.
    """
    _check(**options)
    silent = following(options.get("tensor_parallel_size", 1))
    with nullcontext() if silent else waiting(console(color, stderr=True), f"loading {model or 'the bundled pair'}"):
        from foretoken import LLM

        return LLM(model, draft_model, **options)
