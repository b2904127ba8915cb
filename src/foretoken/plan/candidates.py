"""Candidates of a plan: speculative configurations and their draft lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.artifacts import heads_method
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_config, resolve
from foretoken.models.heads.mtp import has_mtp
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
        """Name of the speculative method."""
        return SpeculativeConfig.of(self.config).method_in_force

    def at(self, depth: int) -> dict[str, Any]:
        """Returns the speculative_config with ``depth`` draft tokens."""
        return {**self.config, "num_speculative_tokens": depth}


def candidates(
    drafts: Sequence[str | Path], heads: Sequence[str | Path], configs: Sequence[Mapping[str, Any]] = ()
) -> list[Candidate]:
    """Returns every draft as a chain and as a tree, the heads, the methods without a model, and ``configs``.

    Raises:
        InvalidRequest: A configuration is not valid, or heads are of no known kind.
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
