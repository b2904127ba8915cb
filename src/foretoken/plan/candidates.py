"""Candidates of a plan (speculative configurations and their draft lengths), and the prediction for each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretoken.core.artifacts import heads_method
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_config, resolve
from foretoken.models.heads.mtp import has_mtp
from foretoken.plan.exports import NAMES, export_config
from foretoken.plan.statistics import around
from foretoken.speculation import SpeculativeConfig, find

CHAIN = tuple(range(1, 9))  # draft lengths of chains
TREE = (8, 14)  # tree sizes
COPIED = (4, 8)  # draft lengths of methods that copy text
_COPIES = ("ngram", "suffix", "retrieval", "prediction")
FREE: tuple[Mapping[str, Any], ...] = ({"method": "ngram"}, {"method": "suffix"}, {"method": "recycling"})


@dataclass(frozen=True)
class Candidate:
    """One configuration at several draft lengths."""

    name: str  # unique within a plan
    config: Mapping[str, Any]  # a speculative_config without "num_speculative_tokens"
    depths: tuple[int, ...]  # draft lengths or tree sizes

    @property
    def method(self) -> str:
        return SpeculativeConfig.of(self.config).method_in_force

    def at(self, depth: int) -> dict[str, Any]:
        """Returns the speculative_config with ``depth`` draft tokens."""
        return {**self.config, "num_speculative_tokens": depth}


def candidates(
    drafts: Sequence[str | Path], heads: Sequence[str | Path], configs: Sequence[Mapping[str, Any]] = ()
) -> list[Candidate]:
    """Returns every draft as a chain and as a tree, the heads, the methods without a model, and ``configs``.

    Raises InvalidRequest if a configuration is not valid, or heads are of no known kind.
    """
    result: list[Mapping[str, Any]] = []
    for draft in map(str, drafts):
        result.append({"method": "draft_model", "model": draft})
        result.append({"method": "draft_model", "model": draft, "tree": "sampled"})
    result += [{"method": head_method(resolve(head)), "model": str(head)} for head in heads]
    return [_candidate(config) for config in (*result, *FREE, *configs)]


def shipped(model: str | Path) -> list[Mapping[str, Any]]:
    """Returns the configurations of what a target's checkpoint ships for drafting: its MTP layers."""
    return [{"method": "mtp"}] if has_mtp(resolve(model)) else []


def head_method(folder: Path) -> str:
    """Returns the method of the heads in ``folder`` by their config.json. Raises InvalidRequest for unknown ones."""
    if (method := heads_method(load_config(folder))) is not None:
        return method
    raise InvalidRequest(
        f"{folder} holds no heads that are known (eagle, eagle3, assistant, mtp, dflash, jetspec, dspark, medusa, "
        "blockwise, early_exit); give them with their method in a speculative_config"
    )


def _candidate(config: Mapping[str, Any]) -> Candidate:
    checked, own = SpeculativeConfig.of(config).unmixed, dict(config)  # at every length of a chain or tree
    method = checked.method_in_force
    kind = find(method)
    if kind is None:
        raise InvalidRequest('a plan compares with plain decoding anyway; leave {"method": "none"} out')
    own.setdefault("method", method)
    depths: tuple[int, ...]
    if own.pop("num_speculative_tokens", None) is not None:
        depths = (checked.tokens,)
    elif method in _COPIES:
        depths = COPIED
    else:
        depths = TREE if kind.drafts_trees or own.get("tree", "chain") != "chain" else CHAIN
    if depths[0] < 1:
        raise InvalidRequest(f"num_speculative_tokens must be at least 1 in a plan, got {checked.tokens}")
    details = [Path(str(own["model"])).name] if own.get("model") else []
    details += [f"{key} {value}" for key, value in own.items() if key not in ("method", "model")]
    return Candidate(" ".join([method, ", ".join(details)]).strip(), own, depths)


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
    estimator: str  # "distribution", "text" or "steps" (see ``replay``), "runs" (see ``vllm``)
    requests: int  # number of requests in the sample
    best: bool = False  # whether it is the fastest at its temperature and batch

    @classmethod
    def predicted(
        cls,
        candidate: Candidate,
        depth: int,
        *,
        tokens: float,
        tokens_width: float,  # half the width of the interval of their logarithm, for another sample
        seconds_width: float,  # likewise of step over plain step
        # seconds until every prompt has its first token, in plain decoding and with the candidate
        first: tuple[float, float],
        decoded: float,  # tokens of a request after its first
        plain_seconds: float,
        step_seconds: float,
        **facts: Any,
    ) -> "PlanRow":
        """Returns the row of a candidate at one draft length."""
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
            "paste": {name: forms[engine] for engine, name in NAMES.items()} if self.best else None,
        }
        return {key: _finite(value) for key, value in facts.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
