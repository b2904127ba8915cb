"""Audits transformers' assisted generation with its defaults: an assistant model, or prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.audit.subject import Audited, AuditedCompletion, CompletionSettings, Ids
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.models.formats.checkpoint import load_tokenizer, resolve
from foretoken.quantize.cached import checkpoint_folder
from foretoken.speculation import SpeculativeConfig

LOOKUP = 10  # draft tokens, as in transformers' documentation
TEMPERED = 1.25
BLEND = 0.5


class Assisted:
    """transformers' ``generate``, one sequence at a time, since assisted generation has no batches.

    All settings are the checkpoint's or transformers' own, including the target's top-k and the assistant's confidence
    threshold; ``law`` has the same filters. End-of-sequence tokens are disabled where texts of one length are sampled.

    Raises:
        InvalidRequest: transformers does not have the configured method.
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
