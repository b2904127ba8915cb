"""Builds the entrants of a race: our configurations and each peer, plain and at every depth."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.bench.peers import export
from foretoken.bench.peers.protocol import OWN_CHOICE, Setup
from foretoken.bench.peers.registry import GGUF_TYPES, OURS, Peer
from foretoken.bench.race import Entrant
from foretoken.bench.setting import cores
from foretoken.control.config import GoodputConfig, parse
from foretoken.core.errors import ForetokenError
from foretoken.models.formats.gguf import is_gguf
from foretoken.speculation import AUTO, SpeculativeConfig


@dataclass(frozen=True)
class Pairing:
    """The models of a race and its settings.

    Attributes:
        draft: None if no method needs one.
        quantization: "" is bf16. Of a GGUF file, its type.
        weights: How one system stores the target.
        dtype: Of what is not quantized; transformers and ours alone take others than bfloat16.
    """

    target: Path
    draft: Path | None
    depths: tuple[int, ...]
    batch: int = 1
    quantization: str = ""
    max_length: int = 2048
    weights: str = "bf16"
    dtype: str = "bfloat16"

    def setup(self, peer: Peer, method: str) -> Setup:
        """Returns the setup of a process of ``peer`` for ``method``."""
        return Setup(
            system=peer.name,
            method=method,
            target=str(self.target),
            draft=str(self.draft) if self.draft is not None and method in _WITH_DRAFT else "",
            quantization=self.quantization,
            weights=self.weights,
            max_length=self.max_length,
            batch=self.batch,
            threads=cores(),
            dtype=self.dtype,
        )


_WITH_DRAFT = (AUTO, "draft_model")  # methods that draft with a draft model
Config = Mapping[str, object]  # a speculative_config, as users write it; an empty one leaves the method to ``LLM``
UNNAMED = "default"  # the method of a row whose configuration names none


def own(pairing: Pairing, configs: Sequence[Config]) -> list[Entrant]:
    """Returns plain decoding once, and every configuration at its own depth or at all depths.

    Raises:
        InvalidRequest: A configuration is not valid.
        ModelLoadError: The target cannot be converted to the GGUF type that the race asks for.
    """
    pairing = _converted(OURS, pairing)
    entrants: list[Entrant] = []
    methods = list(map(_method, configs))
    for method, config in zip(methods, configs, strict=True):
        named = {k: v for k, v in config.items() if k not in ("model", "num_speculative_tokens")}
        named |= {"method": method} if config else {}
        options = tuple(sorted((key, json.dumps(value)) for key, value in named.items()))
        setup = replace(pairing.setup(OURS, method), options=options)
        if "model" in config:
            setup = replace(setup, draft=str(config["model"]))
        if not entrants:
            entrants.append(Entrant(OURS.name, "plain", 0, setup))
        name = UNNAMED if not config else method if methods.count(method) == 1 else _label(config)
        entrants += [Entrant(OURS.name, name, depth, setup) for depth in _depths(config, pairing.depths)]
    return entrants


def peers(
    pairing: Pairing, configs: Sequence[Config], candidates: Sequence[Peer], say: Callable[[str], None]
) -> list[Entrant]:
    """Returns each peer, plain and with the methods that it shares. ``say`` receives the reason why one is skipped."""
    entrants: list[Entrant] = []
    depths: dict[str, tuple[int, ...]] = {}
    for config in configs:  # a peer has one way to use a method, so it races at the first configuration's depths
        depths.setdefault(_method(config), _depths(config, pairing.depths))
    gguf = is_gguf(pairing.target) or (pairing.draft is not None and is_gguf(pairing.draft))
    for peer in candidates:
        if refusal := peer.refusal(pairing.batch, pairing.quantization, gguf):
            say(refusal)
            continue
        try:
            converted = _converted(peer, pairing)
        except ForetokenError as error:
            say(f"{error}. Racing without it.")
            continue
        entrants += _entrants(peer, converted, {m: d for m, d in depths.items() if m in peer.methods})
    return entrants


def _entrants(peer: Peer, pairing: Pairing, depths: dict[str, tuple[int, ...]]) -> list[Entrant]:
    """Entrants share a process where the depth is part of each request; plain decoding is then depth 0."""
    shared = not peer.fixed_depth and peer.name != "openvino"  # OpenVINO's pipeline with a draft always drafts
    plain = pairing.setup(peer, next(iter(depths)) if shared and depths else "plain")
    entrants = [Entrant(peer.name, "plain", 0, plain)]
    for method, each in depths.items():
        setup = pairing.setup(peer, method)
        entrants += [
            Entrant(peer.name, method, k, replace(setup, depth=k) if peer.fixed_depth else setup) for k in each
        ]
    return entrants


def _converted(peer: Peer, pairing: Pairing) -> Pairing:
    """Returns the pair as files that ``peer`` loads. Only the target is quantized, by all."""
    weights = pairing.quantization if is_gguf(pairing.target) else peer.weights[pairing.quantization]
    pairing = replace(pairing, weights=weights)
    if peer.name in ("openvino", "llamacpp"):
        to_openvino = peer.name == "openvino"
        convert: Callable[[Path, str], Path] = export.openvino if to_openvino else export.gguf
        draft = None if pairing.draft is None else convert(pairing.draft, "bf16" if to_openvino else "BF16")
        return replace(pairing, target=convert(pairing.target, weights), draft=draft)
    return replace(pairing, target=export.gguf(pairing.target, weights)) if weights in GGUF_TYPES else pairing


def needs_draft(config: Config) -> bool:
    """Returns whether a configuration drafts with a draft model and names none. Raises InvalidRequest."""
    return _method(config) in _WITH_DRAFT and "model" not in config


def _method(config: Config) -> str:
    SpeculativeConfig.of(config)
    return str(config.get("method") or "draft_model")


def _label(config: Config) -> str:
    """Returns the method and the options that distinguish this configuration."""
    hidden = ("method", "model", "num_speculative_tokens")
    return " ".join(
        [_method(config), *(f"{key}={value}" for key, value in sorted(config.items()) if key not in hidden)]
    )


def _depths(config: Config, depths: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the depths to race: the configuration's own if it names one or chooses it."""
    control: Any = config.get("control", "fixed")
    if not config or config.get("method") == AUTO or isinstance(parse(control), GoodputConfig):
        return (OWN_CHOICE,)
    depth = config.get("num_speculative_tokens")
    return (int(str(depth)),) if depth is not None else depths
