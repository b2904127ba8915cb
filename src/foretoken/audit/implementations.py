"""The implementations audited here: Foretoken's engine, and transformers' assisted generation with its defaults.

The reference of Foretoken is its target's plain forward pass. transformers drafts by an assistant model, or by prompt
lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.audit.negative import PLANTS
from foretoken.audit.subject import Audited, AuditedCompletion, AuditStep, CompletionSettings, Ids
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.llm import LLM
from foretoken.models.formats.checkpoint import eos_ids, load_tokenizer, resolve
from foretoken.plan.texts import SampledText, text_logits
from foretoken.propose.base import Needs, Observation, Proposer, Wrapper
from foretoken.propose.draft_model import DraftModel
from foretoken.quantize.run import checkpoint_folder
from foretoken.speculation import NONE, SpeculativeConfig

_IDENTIFIERS = count(1 << 40)  # above the ids of requests that the same proposer knows


class Foretoken:
    """An engine as configured. Nothing else may run on it during the audit. See ``Audited``."""

    batch = 16
    seeded = True
    open = True

    def __init__(
        self,
        engine: Engine,
        encode: Callable[[str], Sequence[int]],
        # configured number of draft tokens, for steps in which the engine's controller is bypassed
        depth: int | None = None,
        ends: Sequence[int] = (),
        facts: Mapping[str, Any] | None = None,
        float32: Callable[[], Foretoken] | None = None,  # loads the same engine in float32, None if that is impossible
        start: Sequence[int] = (),  # first decoder tokens of an encoder-decoder, whose encoder receives the prompts
        method: str | None = None,  # name of the proposer that drafts, where the engine has several
    ) -> None:
        self.target, self.proposer, self.method = engine.target, engine.proposer, method
        self.controller, self.rule = engine.controller, engine.rule
        self.encode, self.depth, self.ends, self.facts = encode, depth, tuple(ends), facts or {}
        self.bit_equal = engine.target.batch_invariant
        self._float32, self._start = float32, tuple(start)

    @classmethod
    def of(cls, llm: LLM) -> Foretoken:
        """Wraps the engine of ``llm``. For float32 its pair is loaded once more, unquantized."""
        config, target = llm.speculative_config, llm.target

        def again() -> Foretoken:
            options: dict[str, Any] = {"device": target.device, "max_model_len": target.max_length}
            return cls.of(LLM(llm.model, speculative_config=config, dtype=torch.float32, **options))

        facts = {
            "engine": "foretoken",
            "model": llm.model,
            "draft_model": config.model,
            "method": config.method_in_force,
            "num_speculative_tokens": config.tokens,
            "control": type(config.control_in_force).__name__.removesuffix("Config").lower(),
            "rejection": config.rejection,
            "dtype": str(target.dtype).removeprefix("torch."),
        }
        ends = eos_ids(resolve(llm.model), llm.tokenizer, llm.target.vocab_size)
        other = None if target.dtype == torch.float32 else again
        depth = config.tokens if config.method_in_force != NONE else None
        encode, start = partial(_encoded, llm.tokenizer), llm.requests.start
        return cls(llm.engine, encode, depth, ends, facts, other, start, config.method_in_force)

    def law(self, temperature: float) -> SamplingLaw:
        return SamplingLaw(temperature=temperature)

    def generate(self, prompts: Sequence[Ids], settings: CompletionSettings) -> list[AuditedCompletion]:
        proposer = _Keeping(self.proposer) if settings.keep else self.proposer
        engine = Engine(self.target, proposer, self.controller, rule=self.rule, max_sequences=settings.batch)
        contexts = [
            Context(
                next(_IDENTIFIERS),
                list(tokens),
                len(tokens),
                settings.law,
                Streams(seed),
                settings.grade,
                settings.depth,
                method=self.method,
                source=tuple(source),
            )
            for (tokens, source), seed in zip(map(self._prompt_and_source, prompts), settings.seeds, strict=True)
        ]
        steps: dict[int, list[StepOutput]] = {context.id: [] for context in contexts}
        for step in engine.run((context, Length(settings.max_tokens, settings.ends)) for context in contexts):
            steps[step.sequence].append(step)
        kept = proposer.rows if isinstance(proposer, _Keeping) else {}
        return [self._text(context, steps[context.id], kept.get(context.id)) for context in contexts]

    def _prompt_and_source(self, prompt: Ids) -> tuple[Ids, Ids]:
        """Returns the decoder's prompt and the encoder's source."""
        return (self._start, prompt) if self._start else (prompt, ())

    def _text(self, context: Context, steps: Sequence[StepOutput], rows: list[Tensor] | None) -> AuditedCompletion:
        """Builds the completion. ``q`` is None if drafting and verification share random numbers."""
        known = context.exactness is Exactness.DISTRIBUTION
        audited = tuple(
            AuditStep(
                step.position, max(step.draft.depths), _whole(step), self._first_law(step.draft) if known else None
            )
            for step in steps
            if len(step.draft)
        )
        tokens = tuple(context.tokens[context.prompt_length :])
        return AuditedCompletion(tokens, audited, torch.cat(rows) if rows else None)

    def _first_law(self, draft: Draft) -> Tensor:
        """Returns the distribution of the root's children, [V]; uniform over fixed candidates."""
        if not isinstance(draft.law, PointMass):
            return draft.law.probs[0].clone()
        tokens = torch.tensor([draft.ids[child] for child in draft.children[0]])
        chosen = F.one_hot(tokens, self.target.vocab_size).amax(0).float()
        return chosen / chosen.sum()

    def logits(self, prompt: Ids, text: Ids) -> Tensor:
        start, source = map(tuple, self._prompt_and_source(prompt))
        return text_logits(self.target, SampledText(start, tuple(text), len(text), source))

    def reference(self, prompt: Ids, text: Ids, law: SamplingLaw) -> Tensor | None:
        return None

    def planted(self) -> Mapping[str, Foretoken]:
        return {name: self._with(rule=rule) for name, rule in PLANTS.items()}

    def self_drafting(self) -> Foretoken:
        return self._with(proposer=DraftModel(self.target), controller=Fixed(4), depth=None)

    def in_float32(self) -> Foretoken | None:
        return self._float32() if self._float32 is not None else None

    def _with(self, **parts: Any) -> Foretoken:
        other = copy(self)
        for name, part in parts.items():
            setattr(other, name, part)
        return other


class _Keeping(Wrapper):
    """Records the logits that each token was sampled from, by sequence."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.rows: dict[int, list[Tensor]] = {}

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, seen in zip(contexts, observations, strict=True):
            path = [0, *(node + 1 for node in seen.step.verdict.path)][: len(seen.step.tokens)]
            self.rows.setdefault(context.id, []).append(seen.scores.logits[path].float().clone())
        super().observe(contexts, observations)

    def needs_of(self, context: Context) -> Needs:
        return replace(self.inner.needs_of(context), logits=True)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])


def _whole(step: StepOutput) -> bool:
    """Whether a path of the draft's full depth was accepted, even if the text ended inside it."""
    return len(step.verdict.path) == max(step.draft.depths)


LOOKUP = 10  # draft tokens, as in transformers' documentation
TEMPERED = 1.25
BLEND = 0.5


class Assisted:
    """transformers' ``generate``, one sequence at a time, since assisted generation has no batches.

    All settings are the checkpoint's or transformers' own, including the target's top-k and the assistant's confidence
    threshold; ``law`` has the same filters. End-of-sequence tokens are disabled where texts of one length are sampled.
    Raises InvalidRequest if transformers does not have the configured method.
    """

    bit_equal, batch, seeded, open = False, 1, False, False
    depth: int | None = None

    def __init__(self, model: str | Path, config: SpeculativeConfig, dtype: Any = "auto") -> None:
        import transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        method = check_assisted(config)
        path = resolve(model)
        self.tokenizer, self.version = load_tokenizer(path), transformers.__version__
        self.names = {"model": str(model), "draft_model": config.model, "method": method}
        loaded: list[Any] = [
            transformers.AutoModelForCausalLM.from_pretrained(checkpoint_folder(folder), dtype=dtype).eval()
            for folder in (path, *([resolve(config.model)] if config.model else []))
        ]
        self.model, self.draft = loaded[0], loaded[1] if config.model else None
        self.ends = _ends(self.model)
        for each in loaded:
            each.generation_config.eos_token_id = None
            each.generation_config.pad_token_id = 0
        self.options: dict[str, Any] = (
            {"assistant_model": self.draft}
            if self.draft is not None
            else {"prompt_lookup_num_tokens": config.num_speculative_tokens or LOOKUP}
        )
        self.temper = 1.0

    @property
    def facts(self) -> Mapping[str, Any]:
        law = self.law(1.0)
        filters = {"top_k": law.top_k, "top_p": law.top_p, "min_p": law.min_p}
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"engine": f"transformers {self.version}", **self.names, "dtype": dtype, **filters}

    def encode(self, text: str) -> Sequence[int]:
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def law(self, temperature: float) -> SamplingLaw:
        own = self.model.generation_config
        defaults = own._get_default_generation_params() if hasattr(own, "_get_default_generation_params") else {}

        def setting(name: str, neutral: Any) -> Any:
            configured = getattr(own, name, None)
            chosen = defaults.get(name) if configured is None else configured
            return neutral if chosen is None else chosen

        return SamplingLaw(
            temperature=temperature,
            top_k=setting("top_k", 0),
            top_p=setting("top_p", 1.0),
            min_p=setting("min_p", 0.0),
            repetition_penalty=setting("repetition_penalty", 1.0),
        )

    def generate(self, prompts: Sequence[Ids], settings: CompletionSettings) -> list[AuditedCompletion]:
        return [self._one(prompt, seed, settings) for prompt, seed in zip(prompts, settings.seeds, strict=True)]

    def _one(self, prompt: Ids, seed: int, settings: CompletionSettings) -> AuditedCompletion:
        options: dict[str, Any] = {"do_sample": not settings.law.greedy}
        if not settings.law.greedy:
            options["temperature"] = settings.law.temperature * self.temper
        if settings.depth != 0:
            options |= self.options
        if settings.ends:
            options["eos_token_id"] = list(settings.ends)
        ids = torch.tensor([list(prompt)], device=self.model.device)
        with _seeded(seed), torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=settings.max_tokens,
                return_dict_in_generate=True,
                output_logits=settings.keep,
                **options,
            )
        tokens = tuple(out.sequences[0, len(prompt) :].tolist())
        rows = torch.cat(out.logits)[: len(tokens)].float() if settings.keep else None
        return AuditedCompletion(tokens, rows=rows)

    def logits(self, prompt: Ids, text: Ids) -> Tensor:
        return _rows(self.model, prompt, text)

    def reference(self, prompt: Ids, text: Ids, law: SamplingLaw) -> Tensor | None:
        """Returns the assistant's distributions along the text, None without an assistant of the same vocabulary."""
        if self.draft is None or self.draft.config.vocab_size != self.model.config.vocab_size:
            return None
        plain = SamplingLaw(temperature=law.temperature, top_k=law.top_k, top_p=law.top_p, min_p=law.min_p)
        return plain.probs(_rows(self.draft, prompt, text).double().cpu(), [])

    def planted(self) -> Mapping[str, Audited]:
        """Plants transformers' own lossy blend of both distributions where it exists, else another temperature."""
        other = copy(self)
        if self.draft is not None and hasattr(self.model.generation_config, "assistant_ensemble_weight"):
            other.options = self.options | {"assistant_ensemble_weight": BLEND}
            return {f"drafts are verified by a blend of both distributions (assistant_ensemble_weight={BLEND})": other}
        other.temper = TEMPERED
        return {f"texts are sampled at {TEMPERED} times the temperature": other}

    def self_drafting(self) -> Audited | None:
        return None

    def in_float32(self) -> Audited | None:
        return None


def check_assisted(config: SpeculativeConfig) -> str:
    """Returns the method, which transformers has. Raises InvalidRequest if it has not."""
    method = config.method_in_force
    if method not in ("draft_model", "ngram") or (method == "draft_model" and config.model is None):
        raise InvalidRequest(f"transformers assists with a draft_model or by ngram, not with {method!r}; name one")
    return method


def _rows(model: Any, prompt: Ids, text: Ids) -> Tensor:
    """Returns the logits [n, V] that each token of ``text`` [n] is sampled from, in one forward pass."""
    ids = torch.tensor([[*prompt, *text[:-1]]], device=model.device)
    with torch.inference_mode():
        rows: Tensor = model(ids).logits[0, len(prompt) - 1 :].float()
    return rows


def _ends(model: Any) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, list | tuple) else (int(configured),)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch's global generators, from which transformers samples, and restores them afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed % (1 << 63))
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed % (1 << 63))
        yield
