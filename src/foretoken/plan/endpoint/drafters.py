"""Other drafters on the texts that a server wrote: those that copy text, and models with a checkpoint here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.formats.checkpoint import load_tokenizer, resolve
from foretoken.models.loading import load_model
from foretoken.plan.candidates import Candidate, head_method
from foretoken.plan.endpoint.acceptance import CannotTellError, TokensPerPass
from foretoken.plan.predictions import spread
from foretoken.plan.sample import Proposers, Sample
from foretoken.plan.texts import SampledText
from foretoken.probe.answers import ServerAnswer
from foretoken.probe.side import Side, tokenized
from foretoken.speculation import Builder

_FEWEST = 4  # texts from which an interval means something
_DEPTHS = (2, 4, 8)
_MOST_TOKENS = 2**24  # of any vocabulary


class TextsAlone(Model):
    """Stands in for a target of which only texts are known: what it wrote can be replayed, and nothing computed."""

    def __init__(self, vocab_size: int, max_length: int) -> None:
        self.vocab_size, self.max_length = vocab_size, max_length
        self.num_layers, self.hidden_size = 1, 1
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        """Raises InvalidRequest."""
        raise InvalidRequest("this drafter needs the target's logits; give its checkpoint with --checkpoint")

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        raise InvalidRequest("nothing is known of this target but texts")

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        raise InvalidRequest("nothing is known of this target but texts")

    def close(self, handle: Handle) -> None:
        raise InvalidRequest("nothing is known of this target but texts")


@dataclass(frozen=True, slots=True)
class PredictedDrafter:
    """Tokens per pass of a drafter at one draft length. free: whether its drafts cost nothing."""

    name: str
    method: str
    config: Mapping[str, Any]
    depth: int
    tokens: TokensPerPass
    free: bool


@dataclass(frozen=True)
class LocalModels:
    """Checkpoints on this machine. target: of the served model. drafts, heads: what could draft for it."""

    target: str | None = None
    drafts: Sequence[str] = ()
    heads: Sequence[str] = ()


def texts_of(side: Side, answers: Sequence[ServerAnswer], prompts: Sequence[str], limit: int) -> list[SampledText]:
    """Returns the token ids of answers to prompts, each text once.

    Raises:
        CannotTellError: The server tells no token ids, or impossible ones.
    """
    made: dict[SampledText, None] = {}
    for answer, prompt in zip(answers, prompts, strict=True):
        start = answer.prompt_ids or tokenized(side, prompt)
        ids = answer.ids or tokenized(side, answer.text)
        if not start or not ids:
            break
        if not all(0 <= each < _MOST_TOKENS for each in (*start, *ids)):
            raise CannotTellError("other drafters are not replayed, because the server tells impossible token ids")
        if len(ids) > 1:
            made[SampledText(tuple(start), tuple(ids[:limit]), limit)] = None
    if len(made) < _FEWEST:
        raise CannotTellError(
            "other drafters are not replayed, because the server tells token ids of fewer than "
            f"{_FEWEST} different texts"
        )
    return list(made)


def predicted_drafters(
    texts: Sequence[SampledText], temperature: float, copying: Sequence[Candidate], models: LocalModels
) -> list[PredictedDrafter]:
    """Returns tokens per pass of drafters at each of their draft lengths.

    Args:
        texts: What the server wrote without speculation.
        temperature: Of these texts.
        copying: Drafters that copy text.
        models: Checkpoints, for drafters that are models.

    Raises:
        ModelLoadError: A checkpoint cannot be loaded.
    """
    highest = max(max(text.whole) for text in texts)
    longest = max(len(text.whole) for text in texts) + 64
    law = SamplingLaw(temperature=temperature)
    alone = TextsAlone(highest + 1, longest)
    sample = Sample(alone, law, texts, (), Proposers(Builder(alone, None, None, load_model).build))
    result = [each for candidate in copying for each in _estimated(sample, candidate, free=True)]
    if models.target is not None and (models.drafts or models.heads):
        result += _modelled(models, texts, law, highest)
    return result


def _modelled(
    models: LocalModels, texts: Sequence[SampledText], law: SamplingLaw, highest: int
) -> list[PredictedDrafter]:
    path = resolve(str(models.target))
    target = load_model(path)
    if highest >= target.vocab_size:
        raise InvalidRequest(
            f"the server wrote token {highest}, but --checkpoint {models.target} has {target.vocab_size}; "
            "give the checkpoint of the served model"
        )

    @cache
    def load(other: str | Path) -> Model:
        return load_model(resolve(other))

    configs: list[dict[str, Any]] = [{"method": "draft_model", "model": draft} for draft in models.drafts]
    configs += [{"method": head_method(resolve(head)), "model": head, "top_k": 1} for head in models.heads]
    made = [Candidate(f"{one['method']} {Path(str(one['model'])).name}", one, _DEPTHS) for one in configs]
    proposers = Proposers(Builder(target, load_tokenizer(path), path, load).build)
    taps = sorted({tap for each in made for tap in proposers.get(each).needs.taps})
    sample = Sample(target, law, texts, (), proposers, taps)
    return [each for candidate in made for each in _estimated(sample, candidate, free=False)]


def _estimated(sample: Sample, candidate: Candidate, free: bool) -> list[PredictedDrafter]:
    result = []
    for depth in candidate.depths:
        estimate = sample.estimate(candidate, depth)
        drafted = sum(size * share for size, share in estimate.sizes.items())
        tokens = TokensPerPass(estimate.tokens_per_pass, spread(estimate), drafted, estimate.acceptance)
        config = candidate.at(depth)
        result.append(PredictedDrafter(candidate.name, candidate.method, config, depth, tokens, free))
    return result
