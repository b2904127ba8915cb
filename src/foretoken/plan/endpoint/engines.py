"""Each engine's own configuration of a drafter, ready to paste, and what an engine says about its speculation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.plan.candidates import Candidate
from foretoken.probe.client import EndpointClient
from foretoken.probe.dialects import ServerKind

_DEPTHS = (2, 4, 8)
_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
_LLAMACPP_NGRAM = 4  # tokens of the n-gram that llama.cpp looks up, of one size
_SGLANG = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


@dataclass(frozen=True, slots=True)
class Limit:
    """Speculation by concurrency. depths: (from, to, draft length) of requests at once; to is None for all above."""

    depths: tuple[tuple[int, int | None, int], ...]

    @property
    def varies(self) -> bool:
        """Whether the draft length depends on the concurrency."""
        return len({depth for _, _, depth in self.depths}) > 1


def copying(kind: str) -> list[Candidate]:
    """Returns the drafters without a model that a kind of server has."""
    ngram = Candidate("ngram", _NGRAM, _DEPTHS)
    match kind:
        case ServerKind.LLAMACPP:
            own = {"method": "ngram", "prompt_lookup_min": _LLAMACPP_NGRAM, "prompt_lookup_max": _LLAMACPP_NGRAM}
            return [Candidate("ngram", own, _DEPTHS)]
        case ServerKind.FORETOKEN | ServerKind.VLLM:
            return [ngram, Candidate("suffix", {"method": "suffix"}, _DEPTHS)]
        case _:
            return [ngram]


def paste(
    kind: str, config: Mapping[str, Any] | None, depth: int, limit: Limit, current: Mapping[str, Any]
) -> list[str]:
    """Returns lines of an engine's configuration.

    Args:
        kind: The engine.
        config: A speculative_config of ours for another drafter, None to keep the server's own.
        depth: Draft length, 0 to switch speculation off.
        limit: Draft lengths by concurrency.
        current: The server's own configuration, as far as it is known: a speculative_config.
    """
    own = dict(config or current)
    match kind:
        case ServerKind.VLLM:
            return _vllm(own, depth, limit)
        case ServerKind.LLAMACPP:
            return _llamacpp(own, depth)
        case ServerKind.SGLANG:
            return _sglang(own, depth)
        case ServerKind.FORETOKEN:
            return _ours(own, depth)
        case _:
            return [f"draft length {depth}" if depth else "no speculation"]


def _vllm(own: dict[str, Any], depth: int, limit: Limit) -> list[str]:
    if not depth:
        return ["# leave --speculative-config out"]
    keys = {**own, "num_speculative_tokens": depth}
    if limit.varies:
        last = [(first, end if end is not None else 1_000_000, size) for first, end, size in limit.depths]
        keys["num_speculative_tokens"] = max(size for _, _, size in last)
        keys["num_speculative_tokens_per_batch_size"] = [list(each) for each in last]
    hint = [] if "method" in own else ["# beside the method and model that the server has now"]
    return [*hint, f"--speculative-config '{json.dumps(keys)}'"]


def _llamacpp(own: Mapping[str, Any], depth: int) -> list[str]:
    if not depth:
        return ["--spec-type none"]
    if own.get("method") == "ngram":
        size = own.get("prompt_lookup_max", _LLAMACPP_NGRAM)
        return [f"--spec-type ngram-simple --spec-ngram-simple-size-n {size} --spec-ngram-simple-size-m {depth}"]
    model = f"--spec-type draft-simple --spec-draft-model {own['model']} " if own.get("model") else ""
    hint = [] if model else ["# beside --spec-type and the draft that the server has now"]
    return [*hint, f"{model}--spec-draft-n-max {depth} --spec-draft-p-min 0"]


def _sglang(own: Mapping[str, Any], depth: int) -> list[str]:
    if not depth:
        return ["# leave the --speculative-* options out"]
    if own.get("method") == "ngram":
        return [f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {depth + 1}"]
    algorithm = _SGLANG.get(str(own.get("method")))
    model = ""
    if algorithm is not None:
        model = f"--speculative-algorithm {algorithm} --speculative-draft-model-path {own.get('model', 'DRAFT')} "
    hint = [] if model else ["# beside the algorithm and draft that the server has now"]
    chain = f"--speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
    return [*hint, model + chain]


def _ours(own: dict[str, Any], depth: int) -> list[str]:
    if not depth:
        return ["""--speculative-config '{"method": "none"}'"""]
    hint = [] if "method" in own else ["# beside the method and model that the server has now"]
    return [*hint, f"--speculative-config '{json.dumps({**own, 'num_speculative_tokens': depth})}'"]


def told_depth(kind: str, client: EndpointClient) -> int | None:
    """Returns the draft length that a server says it has, None if it does not say."""
    try:
        match kind:
            case ServerKind.SGLANG:
                page = client.get("/server_info") or client.get("/get_server_info")
                steps = json.loads(page).get("speculative_num_steps")
                return int(steps) if steps else None
            case _:
                return None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def ranges(depths: Sequence[tuple[int, int]]) -> Limit:
    """Returns draft lengths by ranges of concurrency from (concurrency, draft length) in ascending order."""
    merged: list[tuple[int, int | None, int]] = []
    start = 1
    for number, (concurrency, depth) in enumerate(depths):
        following = depths[number + 1] if number + 1 < len(depths) else None
        if following is None:
            merged.append((start, None, depth))
        elif following[1] != depth:
            merged.append((start, concurrency, depth))
            start = concurrency + 1
    return Limit(tuple(merged))
