"""Model cards of heads: kind, training and acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import read_object
from foretoken.llm import LLM
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.params import SamplingParams
from foretoken.speculation import SpeculativeConfig
from foretoken.train.card import machine
from foretoken.train.data import Corpus, encode
from foretoken.train.files import PROVENANCE, write_json
from foretoken.train.generated import Prompts

_PROMPTS, _TOKENS = 24, 128
_KINDS = {
    "eagle3": "EAGLE-3 head",
    "peagle": "P-EAGLE head",
    "dflash": "DFlash head",
    "dspark": "DSpark head",
    "mtp": "multi-token-prediction layer",
    "medusa": "Medusa heads",
    "blockwise": "blockwise parallel heads",
    "early-exit": "adapter for an early exit",
}
_METHODS = {"peagle": "eagle3", "early-exit": "early_exit"}  # of the kinds that have another name


def measure_head(target: Path, head: Path, role: str, corpus: Corpus) -> dict[str, float]:
    """Returns mean acceptance lengths at temperatures 0 and 1 with the method's default number of draft tokens.

    They are measured over continuations of prefixes from held-out files.
    """
    method = _METHODS.get(role, role)
    llm = LLM(target, speculative_config={"method": method, "model": str(head), "control": "fixed"}, seed=0)
    stream = encode(corpus.held_out, load_tokenizer(target))
    prompts = Prompts(100, 100).cuts(stream, np.random.default_rng(0), _PROMPTS)
    figures: dict[str, float] = {"nodes": SpeculativeConfig(method=method).tokens}
    for heat in (0.0, 1.0):
        params = SamplingParams(max_tokens=_TOKENS, temperature=heat, ignore_eos=True)
        stats = [output.stats for output in llm.generate(prompts, params)]
        drafts = sum(s.drafts for s in stats)
        figures[f"mean_acceptance_length_{heat:g}"] = 1 + sum(s.accepted for s in stats) / max(drafts, 1)
    llm.close()
    return figures


def write_head_card(target: Path, head: Path, corpus: Corpus) -> Path:
    """Writes README.md and zoo.json beside the weights of ``head``, with its acceptance on ``target``.

    Raises:
        InvalidRequest: ``foretoken train`` did not write the folder.
    """
    facts = _read(head)
    figures = measure_head(target, head, facts["role"], corpus)
    write_json(head / PROVENANCE, facts | {"measured": figures | {"target": target.name}})
    (head / "README.md").write_text(_text(head, target, facts, figures), encoding="utf-8")
    write_json(head / "zoo.json", {"name": head.name, "role": facts["role"]})
    return head / "README.md"


def _read(head: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = read_object(head / PROVENANCE)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {head / PROVENANCE}: {error}; pass a head of 'foretoken train'") from error
    if facts.get("role") not in _KINDS:
        raise InvalidRequest(f"{head} holds a {facts.get('role')!r}; expected one of {', '.join(_KINDS)}")
    return facts


def _commands(facts: dict[str, Any]) -> list[str]:
    """Returns the commands of all runs in order."""
    earlier = facts.get("started_from")
    return [*(_commands(earlier) if earlier else []), facts["command"]]


def _total(facts: dict[str, Any], name: str) -> float:
    """Returns a figure summed over all runs."""
    earlier = facts.get("started_from")
    total: float = facts[name] + (_total(earlier, name) if earlier else 0)
    return total


def _text(head: Path, target: Path, facts: dict[str, Any], figures: dict[str, float]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in facts["settings"].items() if value is not None)
    depths = sum(name.startswith("greedy_") for name in facts)
    chances = {
        name: ", ".join(f"{facts[f'{name}_{k + 1}']:.3f}" for k in range(depths)) for name in ("greedy", "drawn")
    }
    rows = [
        ("role", f"{facts['role']}: {_KINDS[facts['role']]} of {target.name}"),
        ("parameters", f"{facts['parameters']:,}"),
        ("settings", settings),
        ("tokens seen", f"{_total(facts, 'tokens'):,}"),
        ("text", f"{facts['data']['generated_share']:.0%} sampled by the target, the rest {facts['corpus']}"),
        ("training time", f"{_total(facts, 'minutes'):.0f} minutes on {machine(facts)}"),
        ("acceptance by position, temperature 0", chances["greedy"]),
        ("acceptance by position, temperature 1", chances["drawn"]),
    ]
    nodes = f"with {figures['nodes']:.0f} draft tokens per step"
    rows += [
        (f"mean acceptance length at temperature {heat}, {nodes}", f"{figures[f'mean_acceptance_length_{heat}']:.2f}")
        for heat in (0, 1)
    ]
    lines = [f"# {head.name}", "", f"{_KINDS[facts['role']]} for `{target.name}`, of no use with other models."]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["Acceptance by position is conditional on the positions before, along text that the target sampled from"]
    lines += ["prefixes of held-out files. Mean acceptance length: tokens per target pass over"]
    lines += [f"{_PROMPTS} continuations of {_TOKENS} tokens of such prefixes, with the method's default settings."]
    lines += ["", "Trained by", "", *(f"    {command}" for command in _commands(facts)), ""]
    lines += [f"Weights: Apache-2.0. Settings, versions and the curve of the run: `{PROVENANCE}`.", ""]
    return "\n".join(lines)
