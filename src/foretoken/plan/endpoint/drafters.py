"""Other drafters on the texts that a server wrote: those that copy text, and models with a checkpoint here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.models.base import Handle, Model
from foretoken.models.formats.checkpoint import load_tokenizer, resolve
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.plan.candidates import Candidate, head_method
from foretoken.plan.endpoint.statistics import TokensPerPass
from foretoken.plan.replay import Proposers, Sample
from foretoken.plan.texts import SampledText
from foretoken.probe.answers import ServerAnswer
from foretoken.probe.server import CannotTellError, ServerKind, Side, tokenized
from foretoken.speculation import Builder

NGRAM_TOKENS = 4  # of the n-gram that llama.cpp looks up, of one size
_MIN_TEXTS = 4  # from which an interval is estimated
_DEPTHS = (2, 4, 8)
_MAX_ID = 2**24  # above the vocabulary of any model


class TextsAlone(ToyModel):
    """Stands in for a target whose texts alone are known: they can be replayed, and nothing computed."""

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        """Raises InvalidRequest."""
        raise InvalidRequest("this drafter needs the target's logits; give its checkpoint with --checkpoint")


@dataclass(frozen=True, slots=True)
class PredictedDrafter:
    """Tokens per pass of a drafter at one draft length. free: whether its drafts cost nothing."""

    name: str
    method: str
    config: Mapping[str, Any] | None
    depth: int
    tokens: TokensPerPass
    free: bool


@dataclass(frozen=True)
class LocalModels:
    """Checkpoints on this machine. target: of the served model. drafts, heads: possible drafters for it."""

    target: str | None = None
    drafts: Sequence[str] = ()
    heads: Sequence[str] = ()


def copying(kind: str) -> list[Candidate]:
    """Returns the drafters without a model that a kind of server has."""
    low, high = (NGRAM_TOKENS, NGRAM_TOKENS) if kind == ServerKind.LLAMACPP else (2, 4)
    ngram: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high}
    suffix = [{"method": "suffix"}] if kind in (ServerKind.FORETOKEN, ServerKind.VLLM) else []
    return [Candidate(str(config["method"]), config, _DEPTHS) for config in (ngram, *suffix)]


def texts_of(side: Side, answers: Sequence[ServerAnswer], prompts: Sequence[str], limit: int) -> list[SampledText]:
    """Returns the token ids of answers, each text once. Raises CannotTellError without ids, or for impossible ones."""
    texts: dict[SampledText, None] = {}
    for answer, prompt in zip(answers, prompts, strict=True):
        start = answer.prompt_ids or tokenized(side, prompt)
        ids = answer.ids or tokenized(side, answer.text)
        if not start or not ids:
            break
        if not all(0 <= each < _MAX_ID for each in (*start, *ids)):
            raise CannotTellError("other drafters are not replayed, because the server reports impossible token ids")
        if len(ids) > 1:
            texts[SampledText(tuple(start), tuple(ids[:limit]), limit)] = None
    if len(texts) < _MIN_TEXTS:
        raise CannotTellError(
            "other drafters are not replayed, because the server reports token ids of fewer than "
            f"{_MIN_TEXTS} different texts"
        )
    return list(texts)


def predicted_drafters(
    texts: Sequence[SampledText], temperature: float, copying: Sequence[Candidate], models: LocalModels
) -> list[PredictedDrafter]:
    """Returns tokens per pass of drafters at each of their draft lengths, on texts written without speculation.

    Raises ModelLoadError if one of the checkpoints in ``models`` cannot be loaded.
    """
    highest, longest = max(max(text.whole) for text in texts), max(len(text.whole) for text in texts)
    law, alone = SamplingLaw(temperature=temperature), TextsAlone(highest + 1, max_length=longest + 64)
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
    def load(other: str | Path, **options: Any) -> Model:
        return load_model(resolve(other), **options)

    configs: list[dict[str, Any]] = [{"method": "draft_model", "model": draft} for draft in models.drafts]
    configs += [{"method": head_method(resolve(head)), "model": head, "top_k": 1} for head in models.heads]
    candidates = [Candidate(f"{one['method']} {Path(str(one['model'])).name}", one, _DEPTHS) for one in configs]
    proposers = Proposers(Builder(target, load_tokenizer(path), path, load).build)
    taps = sorted({tap for each in candidates for tap in proposers.get(each).needs.taps})
    sample = Sample(target, law, texts, (), proposers, taps)
    return [each for candidate in candidates for each in _estimated(sample, candidate, free=False)]


def _estimated(sample: Sample, candidate: Candidate, free: bool) -> list[PredictedDrafter]:
    result = []
    for depth in candidate.depths:
        estimate = sample.estimate(candidate, depth)
        drafted = sum(size * fraction for size, fraction in estimate.sizes.items())
        tokens = TokensPerPass(estimate.tokens_per_pass, estimate.spread, drafted, estimate.acceptance)
        result.append(PredictedDrafter(candidate.name, candidate.method, candidate.at(depth), depth, tokens, free))
    return result
