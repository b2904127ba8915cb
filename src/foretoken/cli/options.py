"""Options that several commands share, and loading of the model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import zoo
from foretoken.cli.files import json_object, write_json, write_text
from foretoken.cli.grouped import option
from foretoken.cli.theme import ColorMode, console, note, print_parts, waiting, wide_console
from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.models import options as checks
from foretoken.propose.methods import check_method

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.llm import LLM
    from foretoken.speculation import SpeculativeConfig


UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
THOUSANDS = {"": 1, "k": 1_000, "M": 1_000_000}
MODEL, DRAFT_MODEL = ("--model", "-m"), ("--draft-model", "-md")  # names of options, for every command

Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
WeightFormat = Annotated[
    str,
    typer.Option(
        help="raw; packed: bfloat16 weights in 12 bits of memory, without loss; auto: packed if few rows gain."
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and output together.")]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel-size", help="Processes that share the target, under torchrun.")
]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")]
SpeculativeTokens = Annotated[int | None, typer.Option(help="Tokens drafted per step; 0 is plain decoding.")]
TextColor = Annotated[ColorMode, typer.Option(help="Colour text by origin.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The target model."""

    model: str | None = option(None, "Target model: a folder, GGUF file or hub name. [bundled target]", *MODEL)


@dataclass(frozen=True, kw_only=True)
class PositionalTarget(TargetOptions):
    """The target model, named by an argument or by ``--model``. Raises InvalidRequest if both name one."""

    model_argument: Annotated[str | None, typer.Argument(metavar="MODEL", help="Target model, as in --model.")] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", named_once(self.model_argument, self.model))


@dataclass(frozen=True, kw_only=True)
class ModelOptions(TargetOptions):
    """The models, and the way to speculate."""

    draft_model: str | None = option(
        None, "Draft model or heads: a folder, GGUF file, hub name, or auto: see drafts.", *DRAFT_MODEL
    )
    speculative_config: str | None = option(None, 'For instance \'{"method": "ngram"}\'.', metavar="JSON")

    @property
    def config(self) -> dict[str, Any] | None:
        """The way to speculate, or None. Raises InvalidRequest."""
        return None if self.speculative_config is None else speculative(self.speculative_config)

    def pair(self) -> tuple[str | Path, SpeculativeConfig]:
        """Returns the target and the way in which another engine speculates, the bundled pair where no model is named.

        Raises InvalidRequest if they contradict each other.
        """
        from foretoken.speculation import SpeculativeConfig, with_draft, with_published

        config, draft = SpeculativeConfig.of(self.config), self.draft_model
        if self.model is None and draft is None and config.model is None and config.method in (None, "draft_model"):
            draft = str(zoo.path("draft"))
        target = self.model or zoo.path("target")
        return target, with_published(with_draft(config, draft), target)[0].unmixed


@dataclass(frozen=True, kw_only=True)
class PositionalModelOptions(ModelOptions, PositionalTarget):
    """The models, the target by an argument or option, and the way to speculate."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Number format of activations, and the device."""

    dtype: Dtype = "auto"
    device: str = option("auto", "auto, cpu or cuda.")


@dataclass(frozen=True, kw_only=True)
class TargetFormats:
    """Number formats of the target's weights and KV cache."""

    quantization: str | None = option(None, "int8 or int4: quantize the target's weights on loading. [as stored]")
    weight_format: WeightFormat = "auto"
    kv_cache_dtype: str = option(
        "auto", "auto; int8: twice as many cached tokens; bfloat16, of a float32 model.", "--kv-cache-dtype"
    )

    def check(self) -> None:
        """Raises InvalidRequest for unknown names."""
        check_formats(vars(self))


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions(TargetFormats, DeviceOptions):
    """Number formats and devices of the models, by the names of the arguments of ``LLM``."""


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Destinations of the result."""

    as_json: Json = False
    output: Path | None = option(None, "Write the JSON document to a file.", "--output", "-o", metavar="FILE")
    color: ColorMode = option(ColorMode.AUTO, "Colours in tables.")

    def write(
        self, record: Any, parts: Callable[[], Iterable[Any]] = tuple, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Prints a result, and writes it to a file. Raises WriteError if the file cannot be written.

        parts: Returns the tables and lines to print instead, if JSON is not requested. facts: The setting of the
        measurement, which is printed behind them.
        """

        if self.as_json:
            print(json.dumps(record, indent=2, default=str))
        else:
            out = wide_console(self.color)
            print_parts(out, parts())
            if facts is not None:
                note(out, ", ".join(f"{key} {value}" for key, value in facts.items()), soft_wrap=False)
        if self.output is not None:
            write_json(self.output, record)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ResultOptions):
    """Destinations of the result, a page among them."""

    html_file: Path | None = option(None, "Write a page.", "--html", metavar="FILE")

    def publish(
        self,
        record: Any,
        parts: Callable[[], Iterable[Any]],
        page: Callable[[], str],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Prints and writes a result as ``write`` does, and writes the page. Raises WriteError."""
        self.write(record, parts, facts)
        if self.html_file is not None:
            write_text(self.html_file, page())


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """A server that is measured from outside, and the server to compare it with."""

    baseline: str | None = option(
        None, "The same model served without speculation. [switched off per request]", metavar="URL"
    )
    server: str = option("auto", "Kind of the endpoint: auto, foretoken, vllm, llamacpp, sglang or openai.")
    api_key: str | None = option(None, "API key of the endpoint.", envvar="FORETOKEN_API_KEY")
    baseline_api_key: str | None = option(None, "That of the baseline. [the same]")

    timeout: float = option(120.0, "Seconds for one answer of the endpoint.", min=1)
    retries: int = option(4, "Further tries of a request to the endpoint.", min=0)

    def arguments(self) -> dict[str, Any]:
        """Returns the same by the names of the fields of ``ServerPair`` and ``Endpoint``. Raises InvalidRequest."""
        from foretoken.probe.client import Patience
        from foretoken.probe.server import ServerKind

        if self.server not in list(ServerKind):
            raise InvalidRequest(f"--server must be {', '.join(ServerKind)}, got {self.server!r}")
        return {
            "baseline": self.baseline,
            "kind": ServerKind(self.server),
            "key": self.api_key,
            "baseline_key": self.baseline_api_key,
            "patience": Patience(self.timeout, self.retries),
        }


def announcing(notes: Console, dry_run: bool) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a function that prints the costs of measuring a server, and returns whether to spend them."""

    def announce(costs: Mapping[str, Any]) -> bool:
        sent, waves = costs["sent"], ""
        if "waves" in costs:
            concurrency = ", ".join(map(str, costs["concurrency"]))
            waves = f" in {costs['waves']} waves of {concurrency} at once; about {costs['minutes']:.1f} minutes"
        line = (
            f"about {costs['requests']:,} requests, {costs['prompt_tokens']:,} prompt tokens and {costs['tokens']:,} "
            f"generated tokens{waves}; {sent['requests']:,} requests and {sent['tokens']:,} generated tokens are spent "
            "already, to find this out"
        )
        line += f"; {costs['power']}" if "power" in costs else ""
        note(notes, line)
        return not dry_run

    return announce


def budget(text: str) -> tuple[int | None, float | None]:
    """Returns a budget in tokens or in seconds, the other is None. Raises InvalidRequest."""
    counted = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kM]?)\s*tok(?:en)?s?", text.strip())
    if counted is not None and float(counted[1]) > 0.0:
        return int(float(counted[1]) * THOUSANDS[counted[2]]), None
    return None, duration(text, "a time such as 90s, 5m or 1h, or for an endpoint tokens such as 60ktokens")


def duration(text: str, expected: str = "a time such as 90s, 5m or 1h") -> float:
    """Returns the seconds of ``--budget``. Raises InvalidRequest."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) == 0.0:
        raise InvalidRequest(f"--budget must be {expected}, got {text!r}")
    return float(match[1]) * UNITS[match[2]]


def named_once(argument: str | None, option: str | None) -> str | None:
    """Returns the model that an argument or ``--model`` names. Raises InvalidRequest if both do."""
    if argument is not None and option is not None:
        raise InvalidRequest(f"two models are given, {argument} and --model {option}; leave one of them out")
    return option if argument is None else argument


def names(kind: str, text: str, known: Collection[str]) -> list[str]:
    """Returns the names in a comma-separated list. Raises InvalidRequest for unknown ones."""
    result = [name.strip() for name in text.split(",")]
    if unknown := [name for name in result if name not in known]:
        raise InvalidRequest(f"unknown {kind} {unknown[0]!r}; known: {', '.join(known)}")
    return result


def counts(option: str, text: str) -> tuple[int, ...]:
    """Returns the positive integers in a comma-separated list, each once. Raises InvalidRequest."""
    try:
        result = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        result = ()
    if not result or min(result) < 1:
        raise InvalidRequest(f"{option} must be positive integers such as 1,4,16, got {text!r}")
    return result


def speculative(text: str) -> dict[str, Any]:
    """Returns the configuration in a JSON text. Raises InvalidRequest."""
    config = json_object("--speculative-config", text, """for instance '{"method": "ngram"}'""")
    if isinstance(config.get("method"), str):
        check_method(config["method"])
    return config


def check_formats(options: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for unknown names of formats and backends among the arguments of ``LLM``."""
    if "dtype" in options:
        checks.check_dtype(options["dtype"])
    names = ("backend", "quantization", "weight_format", "kv_cache_dtype")
    checks.check_options(**{name: options[name] for name in names if name in options})


def _check(options: Mapping[str, Any]) -> None:
    check_formats(options)
    processes = options.get("tensor_parallel_size", 1)
    integer("max_model_len", options.get("max_model_len"), 1, optional=True)
    integer("tensor_parallel_size", processes, 1)
    checks.check_adapters(options.get("lora", ()), options.get("backend", "auto"), processes)
    for method in options.get("methods", ()):
        if isinstance(method, str):
            check_method(method)


def following(tensor_parallel_size: int) -> bool:
    """Returns whether this process only computes its share of the first process's forward passes."""
    return tensor_parallel_size > 1 and os.environ.get("RANK", "0") != "0"


def load(model: str | None, draft_model: str | None, color: ColorMode, **options: Any) -> LLM:
    """Loads an ``LLM`` with ``options``, showing a spinner on standard error.

    Raises InvalidRequest. Wrong names and numbers are refused before anything heavy is imported.
    """
    _check(options)
    spinner = waiting(console(color, stderr=True), f"loading {model or 'the bundled pair'}", silent=True)
    with nullcontext() if following(options.get("tensor_parallel_size", 1)) else spinner:
        from foretoken import LLM
        from foretoken.core.native.sampling import kernels

        llm = LLM(model, draft_model, **options)
        if llm.chosen_drafter:
            note(console(color, stderr=True), llm.chosen_drafter)
        if llm.target.device.type == "cpu":
            kernels()  # which the first token would compile
        return llm


PEERS = "transformers,openvino,vllm,llamacpp"
Peers = Annotated[str, typer.Option(help="Comma-separated, or none.")]


@dataclass(frozen=True, kw_only=True)
class BenchmarkModels(PositionalTarget):
    """The models that are measured."""

    model: str | None = option(
        None, "Target: a folder or GGUF file. [the bundled one, widened to 0.7b]", "--target", *MODEL
    )
    draft_model: str | None = option(None, "Draft: a folder or GGUF file. [the bundled one]", "--draft", *DRAFT_MODEL)

    @property
    def target(self) -> Path | None:
        return None if self.model is None else Path(self.model)

    @property
    def draft(self) -> Path | None:
        return None if self.draft_model is None else Path(self.draft_model)


def models_or_bundled(
    target: Path | None, draft: Path | None, configs: Sequence[Mapping[str, Any]]
) -> tuple[Path, Path | None]:
    """Returns target and draft, the bundled pair in place of what is not given.

    Args:
        configs: The ways to speculate. The draft is None if it was not given and none of them needs one.

    Raises:
        InvalidRequest: A target without a draft model, which a configuration needs.
    """
    from foretoken.bench.race import needs_draft
    from foretoken.train.widen.checkpoint import scaled

    if target is not None and draft is None:
        if any(map(needs_draft, configs)):
            raise InvalidRequest(
                "--target was given without --draft; name its draft too, or a method without a draft model, such as "
                """--speculative-config '{"method": "ngram"}'"""
            )
        return target, None
    return target or scaled("0.7b"), draft or zoo.path("draft")
