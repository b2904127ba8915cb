"""One prediction of a plan, and its configuration as other engines write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.speculation import find

_VLLM = {
    "draft_model": ("model",), "eagle3": ("model",), "eagle": ("model",), "medusa": ("model",),
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"), "suffix": (),
}  # fmt: skip
_NGRAM = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One prediction. config: what to paste.

    tokens_per_pass: prompts' passes left out. speedup: of decoding over plain decoding in the same batch, end_to_end
    with the prompts' passes; low and high: 95 of 100 further runs over as many requests should lie between them.
    round_seconds, draft_seconds, plain_seconds: a round, drafting in it, and a plain step, of the whole batch.
    acceptance: by position, rounds that accepted so deep over rounds that drafted so deep. estimator: "law", "text" or
    "rounds" (see ``chains`` and ``replay``). best: the fastest at its temperature and batch.
    """

    name: str
    method: str
    config: Mapping[str, Any]
    temperature: float
    batch: int
    tokens_per_pass: float
    tokens_per_pass_low: float
    tokens_per_pass_high: float
    speedup: float
    low: float
    high: float
    end_to_end: float
    round_seconds: float
    draft_seconds: float
    plain_seconds: float
    acceptance: tuple[float, ...]
    estimator: str
    requests: int
    best: bool = False

    @property
    def num_speculative_tokens(self) -> int:
        return int(self.config["num_speculative_tokens"])

    def to_dict(self) -> dict[str, Any]:
        """Endless intervals (one request) are None."""
        forms = exports(self.config)
        facts = asdict(self) | {
            "num_speculative_tokens": self.num_speculative_tokens,
            "interval": [_finite(self.tokens_per_pass_low), _finite(self.tokens_per_pass_high)],
            "paste": {"vLLM": forms["vllm"], "transformers": forms["transformers"]} if self.best else None,
        }
        return {key: _finite(value) for key, value in facts.items()}


def vllm(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """vLLM's ``speculative_config``, None where it has no such method. Its drafts are chains: of a tree, as deep."""
    method = config["method"]
    if method not in _VLLM:
        return None
    defaults = _NGRAM if method == "ngram" else {}
    kept = {key: config.get(key, defaults.get(key)) for key in _VLLM[method]}
    depth = config["num_speculative_tokens"]
    return {
        "method": method, **{key: value for key, value in kept.items() if value is not None},
        "num_speculative_tokens": depth if is_chain(config) else min(depth, 4),
    }  # fmt: skip


def transformers(config: Mapping[str, Any]) -> str | None:
    """A call of transformers' ``generate``, None where it has no such method.

    Its defaults end a draft early where it is unsure, and change the depth as they go; both are switched off.
    """
    method, depth = config["method"], config["num_speculative_tokens"]
    if method == "ngram":
        size = config.get("prompt_lookup_max", _NGRAM["prompt_lookup_max"])
        return f"model.generate(**inputs, prompt_lookup_num_tokens={depth}, max_matching_ngram_size={size})"
    if method == "early_exit" and config.get("exit_layer"):
        return f"model.generate(**inputs, assistant_early_exit={config['exit_layer']})"
    if method != "draft_model":
        return None
    return "\n".join([
        f"draft = AutoModelForCausalLM.from_pretrained({config['model']!r})",
        f"draft.generation_config.num_assistant_tokens = {depth if is_chain(config) else min(depth, 4)}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        "draft.generation_config.assistant_confidence_threshold = 0",
        "model.generate(**inputs, assistant_model=draft)",
    ])  # fmt: skip


def is_chain(config: Mapping[str, Any]) -> bool:
    """Whether drafts are single paths, so that their nodes are their depth."""
    method = find(config["method"])
    trees = method is not None and method.drafts_trees
    return config.get("tree", "chain") == "chain" and (not trees or config.get("top_k") == 1)


def exports(config: Mapping[str, Any]) -> dict[str, Any]:
    """By engine."""
    return {"foretoken": dict(config), "vllm": vllm(config), "transformers": transformers(config)}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
