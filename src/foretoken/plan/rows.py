"""One prediction of a plan, and its configuration as other engines write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.plan.candidates import Candidate
from foretoken.plan.statistics import around
from foretoken.speculation import find

_VLLM: Mapping[str, tuple[str, ...]] = {
    "draft_model": ("model",),
    "eagle3": ("model",),
    "eagle": ("model",),
    "dflash": ("model",),
    "dspark": ("model",),
    "mtp": ("model",),
    "medusa": ("model",),
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (),
}
"""Keys that vLLM's configuration shares with ours, by method."""
_CHAIN_OF_TREE = 4  # greatest draft length of the chain that replaces a tree in an engine without trees
_NGRAM = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One prediction.

    Intervals are for further runs over as many requests: 95 of 100 should lie inside. Times are of the whole batch.

    acceptance: by position. In a plan for this engine, the fraction of steps that accepted so deep. In a plan for vLLM,
    conditional on the positions before.
    """

    name: str  # of the candidate
    method: str
    config: Mapping[str, Any]  # the speculative_config to paste
    temperature: float
    batch: int  # sequences at once
    tokens_per_pass: float  # emitted tokens over target passes, without prefill
    tokens_per_pass_low: float  # ends of its interval
    tokens_per_pass_high: float
    speedup: float  # of decoding over plain decoding in the same batch
    low: float  # ends of its interval
    high: float
    end_to_end: float  # speedup with prefill included
    step_seconds: float
    draft_seconds: float  # seconds of drafting in a step
    plain_seconds: float  # seconds of a plain step
    acceptance: tuple[float, ...]
    estimator: str  # "distribution" (see ``chains``), "text" or "steps" (see ``replay``), "runs" (see ``vllm``)
    requests: int  # number of requests in the sample
    best: bool = False  # whether it is the fastest at its temperature and batch

    @classmethod
    def predicted(
        cls,
        candidate: Candidate,
        depth: int,
        *,
        tokens: float,
        tokens_width: float,
        seconds_width: float,
        first: tuple[float, float],
        decoded: float,
        plain_seconds: float,
        step_seconds: float,
        **facts: Any,
    ) -> PlanRow:
        """Returns the row of a candidate at one draft length.

        Args:
            candidate: The candidate.
            depth: Draft length.
            tokens: Tokens per pass.
            tokens_width: Half the width of the interval of their logarithm, for another sample.
            seconds_width: Likewise of step over plain step.
            first: Seconds until every prompt has its first token, in plain decoding and with the candidate.
            decoded: Tokens of a request after its first.
            plain_seconds: Seconds of a plain step.
            step_seconds: Seconds of a step.
            facts: The other fields.
        """
        speedup = tokens * plain_seconds / step_seconds
        fewest, most = around(tokens, tokens_width)
        low, high = around(speedup, math.hypot(tokens_width, seconds_width))
        return cls(
            name=candidate.name,
            method=candidate.method,
            config=candidate.at(depth),
            tokens_per_pass=tokens,
            tokens_per_pass_low=fewest,
            tokens_per_pass_high=most,
            speedup=speedup,
            low=low,
            high=high,
            end_to_end=(first[0] + decoded * plain_seconds) / (first[1] + decoded / tokens * step_seconds),
            plain_seconds=plain_seconds,
            step_seconds=step_seconds,
            **facts,
        )

    @property
    def num_speculative_tokens(self) -> int:
        """Draft length or tree size."""
        return int(self.config["num_speculative_tokens"])

    def to_dict(self) -> dict[str, Any]:
        """Returns the row for JSON. Infinite ends of intervals (one request) are None."""
        forms = export_config(self.config)
        facts = asdict(self) | {
            "num_speculative_tokens": self.num_speculative_tokens,
            "interval": [_finite(self.tokens_per_pass_low), _finite(self.tokens_per_pass_high)],
            "paste": {"vLLM": forms["vllm"], "transformers": forms["transformers"]} if self.best else None,
        }
        return {key: _finite(value) for key, value in facts.items()}


def vllm(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns vLLM's ``speculative_config``, None if vLLM lacks the method. A tree becomes a chain."""
    method = "dflash" if config["method"] == "jetspec" else config["method"]
    if method not in _VLLM:
        return None
    defaults = _NGRAM if method == "ngram" else {}
    kept = {key: config.get(key, defaults.get(key)) for key in _VLLM[method]}
    own = {key: value for key, value in kept.items() if value is not None}
    return {"method": method, **own, "num_speculative_tokens": _chain_length(config)}


def transformers(config: Mapping[str, Any]) -> str | None:
    """Returns a call of transformers' ``generate``, None if transformers lacks the method.

    The defaults of transformers end a draft early at low confidence and adapt its length. Both are switched off.
    """
    method, depth = config["method"], config["num_speculative_tokens"]
    if method == "ngram":
        size = config.get("prompt_lookup_max", _NGRAM["prompt_lookup_max"])
        return f"model.generate(**inputs, prompt_lookup_num_tokens={depth}, max_matching_ngram_size={size})"
    if method == "early_exit" and config.get("exit_layer"):
        return f"model.generate(**inputs, assistant_early_exit={config['exit_layer']})"
    if method != "draft_model":
        return None
    lines = [
        f"draft = AutoModelForCausalLM.from_pretrained({config['model']!r})",
        f"draft.generation_config.num_assistant_tokens = {_chain_length(config)}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        "draft.generation_config.assistant_confidence_threshold = 0",
        "model.generate(**inputs, assistant_model=draft)",
    ]
    return "\n".join(lines)


def is_chain(config: Mapping[str, Any]) -> bool:
    """Whether drafts are chains, so that their size is their depth."""
    method = find(config["method"])
    trees = method is not None and method.drafts_trees
    return config.get("tree", "chain") == "chain" and (not trees or config.get("top_k") == 1)


def _chain_length(config: Mapping[str, Any]) -> int:
    depth: int = config["num_speculative_tokens"]
    return depth if is_chain(config) else min(depth, _CHAIN_OF_TREE)


def export_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration in the form of each engine, by the engine's name."""
    return {"foretoken": dict(config), "vllm": vllm(config), "transformers": transformers(config)}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
