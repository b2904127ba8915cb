"""A speculative configuration in the form of other engines, from one table per engine."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from foretoken.speculation import find

_LENGTH = "num_speculative_tokens"
_NGRAM = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
_CHAIN_OF_TREE = 4  # greatest draft length of the chain that replaces a tree
_DERIVED = {"path": "model", "gguf": "model", "depth": _LENGTH, "rows": _LENGTH}  # fields of a piece, and their key

_STEPS = ("--speculative-num-steps {depth}", "--speculative-eagle-topk 1", "--speculative-num-draft-tokens {rows}")
_SGLANG_DRAFT = "--speculative-draft-model-path {path}"
_SPEC_LENGTH = ("--spec-draft-n-max {depth}", "--spec-draft-p-min 0")
_MAX = ("--draft-model-path {path}", "--num-speculative-tokens {depth}")
_ASSISTED = """draft = AutoModelForCausalLM.from_pretrained({model!r})
draft.generation_config.num_assistant_tokens = {depth}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0
model.generate(**inputs, assistant_model=draft)"""  # by default transformers ends drafts early and adapts their length


@dataclass(frozen=True)
class EngineForms:
    """Settings of another engine."""

    name: str  # the engine
    version: str  # version or commit whose documentation and options the settings were checked against
    # by our method, pieces of the settings with our keys as fields. ``depth`` is the length of a chain, and ``rows``
    # one more. Pieces whose key is missing are skipped.
    methods: Mapping[str, Sequence[str]]
    length: Sequence[str] = ()  # pieces that change the draft length alone


def _each(template: str, names: Mapping[str, str], *pieces: str) -> dict[str, tuple[str, ...]]:
    """Returns the settings of methods that differ in a name alone."""
    return {method: (template.format(name), *pieces) for method, name in names.items()}


ENGINES = {
    "sglang": EngineForms(
        "SGLang",
        "0.5.23",
        _each(
            "--speculative-algorithm {}",
            {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN", "assistant": "NEXTN"},
            *(_SGLANG_DRAFT, *_STEPS),
        )
        | {
            "dflash": ("--speculative-algorithm DFLASH", _SGLANG_DRAFT, _STEPS[-1]),
            "jetspec": ("--speculative-algorithm DFLASH", _SGLANG_DRAFT, _STEPS[-1]),  # reads is_causal
            "dspark": ("--speculative-algorithm DSPARK", _SGLANG_DRAFT, "--speculative-dspark-block-size {depth}"),
            "ngram": ("--speculative-algorithm NGRAM", _STEPS[-1]),
        },
        _STEPS,
    ),
    "llamacpp": EngineForms(
        "llama.cpp",
        "f5e85d43a048",
        _each(
            "--spec-type draft-{}",
            {"draft_model": "simple", "eagle3": "eagle3", "mtp": "mtp", "assistant": "mtp"}
            | {"dflash": "dflash", "dspark": "dspark"},
            *("--spec-draft-model {gguf}", *_SPEC_LENGTH),
        )
        | {
            "ngram": (
                "--spec-type ngram-simple --spec-ngram-simple-size-n {prompt_lookup_max}",
                "--spec-ngram-simple-size-m {depth}",
            ),
        },
        _SPEC_LENGTH,
    ),
    "tensorrt_llm": EngineForms(
        "TensorRT-LLM",
        "1.4.0rc4",
        _each(
            "speculative_config={}DecodingConfig(max_draft_len={{depth}}, speculative_model={{model!r}})",
            {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"},
        )
        | {
            "draft_model": (
                "speculative_config=DraftTargetDecodingConfig(max_draft_len={depth}, speculative_model={model!r}),",
                "disable_overlap_scheduler=True",
            ),
            "mtp": ("speculative_config=MTPDecodingConfig(max_draft_len={depth})",),  # in the target's checkpoint
            "ngram": (
                "speculative_config=NGramDecodingConfig(max_draft_len={depth},",
                "max_matching_ngram_size={prompt_lookup_max}), disable_overlap_scheduler=True",
            ),
        },
    ),
    "max": EngineForms(  # block drafters run at the length that they were trained for
        "Modular MAX",
        "26.7.0",
        {
            "eagle": ("--speculative-method eagle", *_MAX, "# Llama 3 targets"),
            "eagle3": ("--speculative-method eagle", *_MAX, "# Kimi K2.5, MiniMax M3 targets"),
            "mtp": ("--speculative-method mtp", _MAX[-1]),  # in the target's checkpoint
            "assistant": ("--speculative-method mtp", *_MAX),
            "dflash": ("--speculative-method dflash", _MAX[0], "# Llama 3, Gemma 4, Kimi K2.5 targets"),
            "dspark": ("--speculative-method dspark", _MAX[0], "# Gemma 4, Nemotron-H, Kimi K3 targets"),
        },
    ),
    "transformers": EngineForms(
        "transformers",
        "5.23",
        {
            "draft_model": (_ASSISTED,),
            "ngram": (
                "model.generate(**inputs, prompt_lookup_num_tokens={depth},",
                "max_matching_ngram_size={prompt_lookup_max})",
            ),
            "early_exit": ("model.generate(**inputs, assistant_early_exit={exit_layer})",),
        },
    ),
}
"""Engines that take options or a call, by their name in JSON."""

_VLLM: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    **{name: ({}, ("model",)) for name in ("draft_model", "eagle3", "eagle", "dflash", "dspark", "mtp", "medusa")},
    "jetspec": ({"method": "dflash"}, ("model",)),
    "assistant": ({"method": "mtp"}, ("model",)),
    "peagle": ({"method": "eagle3"}, ("parallel_drafting", "model")),
    "ngram": ({}, tuple(_NGRAM)),
    "suffix": ({}, ()),
}
"""Keys of vLLM's own, and keys that its configuration shares with ours, by method."""
NAMES = {"vllm": "vLLM"} | {engine: forms.name for engine, forms in ENGINES.items()}
TITLES = {"foretoken": "foretoken", "vllm": "vLLM 0.32"} | {
    engine: f"{forms.name} {forms.version}" for engine, forms in ENGINES.items()
}
"""Names with the versions that the forms were checked against."""


def vllm(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns vLLM's ``speculative_config``, None if vLLM lacks the method. A tree becomes a chain."""
    if _kind(config) not in _VLLM:
        return None
    own, shared = _VLLM[_kind(config)]
    values = _values(config, _chain_length(config))
    kept = {key: values[key] for key in shared if values.get(key) is not None}
    return {"method": config["method"], **own, **kept, _LENGTH: values["depth"]}


def settings(engine: str, config: Mapping[str, Any], depth: int) -> str | None:
    """Returns the settings of one of ``ENGINES`` for chains of ``depth`` tokens, None if it lacks the method."""
    values = _values(config, depth)
    pieces = ENGINES[engine].methods.get(_kind(values), ())
    present = [piece for piece in pieces if all(values.get(name) for name in _fields([piece]))]
    return " ".join(present).format(**values) or None


def export_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration in the form of each engine, by the engine's name, None if it lacks the method.

    A tree becomes a chain. A comment at the end of the settings names the keys that the engine cannot express.
    """
    forms: dict[str, Any] = {"foretoken": dict(config), "vllm": vllm(config)}
    for engine, known in ENGINES.items():
        forms[engine] = None
        if pieces := known.methods.get(_kind(config)):
            form = settings(engine, config, _chain_length(config))
            forms[engine] = form and form + _without(config, _fields(pieces))
    return forms


def export_lines(config: Mapping[str, Any]) -> list[str]:
    """Returns the configuration to paste, one line per engine with its version; longer calls are indented."""
    forms, width, lines = export_config(config), 2 + max(map(len, TITLES.values())), []
    for engine, form in forms.items():
        text = form if isinstance(form, str) else f"speculative_config={json.dumps(form)}"
        if engine == "vllm" and form:
            text += _without(config, set(_VLLM[_kind(config)][1]) | {_LENGTH})
        head, *rest = (text if form else "has no such method").splitlines()
        lines += [f"{TITLES[engine]:<{width}}{head}", *(" " * width + line for line in rest)]
    return lines


def _kind(config: Mapping[str, Any]) -> str:
    """Returns the method, "peagle" for an EAGLE-3 head that predicts all positions in one pass."""
    method: str = config.get("method", "")
    return "peagle" if config.get("parallel_drafting") and method == "eagle3" else method


def is_chain(config: Mapping[str, Any]) -> bool:
    """Whether drafts are chains, so that their size is their depth."""
    method = find(config["method"])
    trees = method is not None and method.drafts_trees
    return config.get("tree", "chain") == "chain" and (not trees or config.get("top_k") == 1)


def _chain_length(config: Mapping[str, Any]) -> int:
    depth: int = config[_LENGTH]
    return depth if is_chain(config) else min(depth, _CHAIN_OF_TREE)


def _values(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Returns the fields of pieces: our keys, those of ``_DERIVED``, and defaults of n-gram lookup."""
    values = {**_NGRAM, **config} | {"depth": depth, "rows": depth + 1}
    if model := config.get("model"):
        gguf = str(model) if str(model).endswith(".gguf") else f"{str(model).rstrip('/')}.gguf"
        values = {"method": "draft_model"} | values | {"path": shlex.quote(str(model)), "gguf": shlex.quote(gguf)}
    return values


def _fields(pieces: Iterable[str]) -> set[str]:
    return {name for piece in pieces for _, name, _, _ in Formatter().parse(piece) if name}


def _without(config: Mapping[str, Any], fields: set[str]) -> str:
    """Returns a comment with the keys that none of ``fields`` expresses, empty if there are none."""
    shown = {"method", "tree", "top_k"} | {_DERIVED.get(name, name) for name in fields}
    lost = [*([] if is_chain(config) else ["trees"]), *(key for key in config if key not in shown)]
    return f"  # without {', '.join(lost)}" if lost else ""
