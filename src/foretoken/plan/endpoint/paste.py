"""Configuration of a drafter in the words of each engine, ready to paste."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.probe.dialects import ServerKind

NGRAM_TOKENS = 4  # of the n-gram that llama.cpp looks up, of one size
_SGLANG = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}


@dataclass(frozen=True, slots=True)
class Limit:
    """Speculation by concurrency. depths: (from, to, draft length) of requests at once; to is None for all above."""

    depths: tuple[tuple[int, int | None, int], ...]

    @classmethod
    def of(cls, depths: Sequence[tuple[int, int]]) -> Limit:
        """Returns ranges of equal draft lengths from (concurrency, draft length) in ascending order."""
        merged: list[tuple[int, int | None, int]] = []
        start = 1
        for (concurrency, depth), following in zip(depths, [*depths[1:], None], strict=True):
            if following is None:
                merged.append((start, None, depth))
            elif following[1] != depth:
                merged.append((start, concurrency, depth))
                start = concurrency + 1
        return cls(tuple(merged))

    @property
    def varies(self) -> bool:
        """Whether the draft length depends on the concurrency."""
        return len({depth for _, _, depth in self.depths}) > 1


def paste(
    kind: str, config: Mapping[str, Any] | None, depth: int, limit: Limit, current: Mapping[str, Any]
) -> list[str]:
    """Returns lines of an engine's configuration.

    Args:
        kind: The engine.
        config: A speculative_config of ours for another drafter, None to keep the server's.
        depth: Draft length, 0 to switch speculation off.
        limit: Draft lengths by concurrency.
        current: The server's speculative_config, as far as it is known.
    """
    keys = dict(config or current)
    match kind:
        case ServerKind.VLLM:
            return _vllm(keys, depth, limit)
        case ServerKind.LLAMACPP:
            return _llamacpp(keys, depth)
        case ServerKind.SGLANG:
            return _sglang(keys, depth)
        case ServerKind.FORETOKEN:
            return _json(keys | {"num_speculative_tokens": depth}) if depth else _json({"method": "none"})
        case _:
            return [f"draft length {depth}" if depth else "no speculation"]


def _vllm(keys: dict[str, Any], depth: int, limit: Limit) -> list[str]:
    if not depth:
        return ["# leave --speculative-config out"]
    keys["num_speculative_tokens"] = depth
    if limit.varies:
        ranges = [[first, end if end is not None else 1_000_000, size] for first, end, size in limit.depths]
        keys["num_speculative_tokens"] = max(size for _, _, size in ranges)
        keys["num_speculative_tokens_per_batch_size"] = ranges
    return _json(keys)


def _json(keys: Mapping[str, Any]) -> list[str]:
    hint = [] if "method" in keys else ["# beside the method and model that the server has now"]
    return [*hint, f"--speculative-config '{json.dumps(keys)}'"]


def _llamacpp(keys: Mapping[str, Any], depth: int) -> list[str]:
    if not depth:
        return ["--spec-type none"]
    if keys.get("method") == "ngram":
        size = keys.get("prompt_lookup_max", NGRAM_TOKENS)
        return [f"--spec-type ngram-simple --spec-ngram-simple-size-n {size} --spec-ngram-simple-size-m {depth}"]
    model = f"--spec-type draft-simple --spec-draft-model {keys['model']} " if keys.get("model") else ""
    hint = [] if model else ["# beside --spec-type and the draft that the server has now"]
    return [*hint, f"{model}--spec-draft-n-max {depth} --spec-draft-p-min 0"]


def _sglang(keys: Mapping[str, Any], depth: int) -> list[str]:
    if not depth:
        return ["# leave the --speculative-* options out"]
    if keys.get("method") == "ngram":
        return [f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {depth + 1}"]
    algorithm = _SGLANG.get(str(keys.get("method")))
    model = ""
    if algorithm is not None:
        model = f"--speculative-algorithm {algorithm} --speculative-draft-model-path {keys.get('model', 'DRAFT')} "
    hint = [] if model else ["# beside the algorithm and draft that the server has now"]
    chain = f"--speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
    return [*hint, model + chain]
