"""The proposers that need no model inside vLLM, as its custom proposer class.

    LLM(model, speculative_config={"method": "custom_class", "model": "foretoken.interop_vllm.Proposer",
        "num_speculative_tokens": 8}, additional_config={"foretoken": {"method": "suffix"}})

vLLM hands over the texts of a batch by row, the tokens that the last pass brought, and nothing else (0.32:
``v1/spec_decode/custom_class_proposer.py``). So requests are told apart by their texts, one that is not in the batch
any more is taken to be over, and logits, for those who learn from them, are read where vLLM computes them. Its drafts
are chains: of a tree, the path that promises most. It verifies them as fixed candidates, which they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import Step, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Model, Scores
from foretoken.propose.base import Observation
from foretoken.propose.tolerant import Tolerant
from foretoken.speculation import Builder, SpeculativeConfig, find

METHODS = ("ngram", "suffix", "recycling", "prediction", "mixture")
OPTIONS = "foretoken"  # the key of vLLM's additional_config that holds the method and its keys
_GREEDY = SamplingLaw(temperature=0.0)  # vLLM does not say how requests are sampled; only what is learned is kept by it
_OVER = Timings(0.0, 0.0, 0.0, 0.0, 1)
_USUAL = ({"method": "suffix"}, {"method": "recycling"})  # members of a mixture
_WIDER = 2  # nodes that a proposer may draft for one of the chain, so that a path can be chosen

Ids = NDArray[np.int32]
_predicted: dict[tuple[int, ...], tuple[int, ...]] = {}


def predict(prompt: Sequence[int], text: Sequence[int]) -> None:
    """Say what is expected to come out after ``prompt``, both token ids, before the request is made.

    For method "prediction" where vLLM's engine lives in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0). Requests of
    which nothing was said follow their own prompt, which is right for a text to be edited that stands in it.
    """
    _predicted[tuple(prompt)] = tuple(text)


@dataclass(eq=False, slots=True)
class _Request:
    """One text. row: its tokens as vLLM last had them. chain: what was drafted last. absent: calls without it."""

    context: Context
    row: Ids
    chain: list[int] = field(default_factory=list)
    absent: int = 0


@dataclass(frozen=True)
class _Vocabulary:
    """All that a proposer without a model asks of the target."""

    vocab_size: int


class Proposer:
    """See the module. vllm_config: vLLM's own, whole. Raises InvalidRequest for what cannot draft there."""

    def __init__(self, vllm_config: Any) -> None:
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        self.depth = int(speculative.num_speculative_tokens)
        self.max_length, self.vocab_size = int(model.max_model_len), int(model.get_vocab_size())
        given = (vllm_config.additional_config or {}).get(OPTIONS, {})
        self.inner = Tolerant(_built(given, self.depth, self.vocab_size))
        # With a pipeline its batches take turns, each call seeing one of them.
        stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self._patience = 0 if stages == 1 else 2 * stages
        self._live: list[_Request] = []
        self._rows: list[_Request | None] = []  # of the last call
        self._logits: Tensor | None = None
        self._left = perf_counter()
        self._ids = count(1)
        self.unlearned = 0  # calls whose logits did not fit the rows that were expected

    def load_model(self, model: Any) -> None:
        """Called once by vLLM with the target; there is nothing to load, but logits to look at."""
        if not self.inner.needs.rounds:
            return
        compute = getattr(model, "compute_logits", None)
        if compute is None:
            raise InvalidRequest(f"{type(model).__name__} shows no logits, from which {self.inner.name} learns")

        def looked_at(*args: Any, **options: Any) -> Any:
            self._logits = compute(*args, **options)
            return self._logits

        model.compute_logits = looked_at

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """At most ``num_speculative_tokens`` tokens for each row; none where the prompt is not read yet.

        sampled_token_ids: by row, what the last pass brought. num_tokens_no_spec: [rows], tokens of each text, those
        among them. token_ids_cpu: [rows, max_model_len], the texts.
        """
        seconds = perf_counter() - self._left
        texts = [token_ids_cpu[i, : int(num_tokens_no_spec[i])] for i in range(len(sampled_token_ids))]
        rows = [self._found(i, text, len(sampled_token_ids[i])) for i, text in enumerate(texts)]
        self._learn(rows, sampled_token_ids, seconds)
        self._part(rows)
        self._rows, self._logits = rows, None
        chains = self._chains(rows)
        self._left = perf_counter()
        return chains

    def _found(self, place: int, text: Ids, new: int) -> _Request | None:
        """Whose text it is that has ``new`` tokens more; a new request's where nobody's is."""
        if not new:
            return None
        before = text[: len(text) - new]
        last = self._rows[place] if place < len(self._rows) else None
        for request in (last, *self._live):  # equal texts may change places: nothing tells them apart
            if request is not None and len(request.row) == len(before) and np.array_equal(request.row, before):
                request.context.tokens.extend(text[len(before) :].tolist())
                break
        else:
            tokens = text.tolist()
            prompt = tuple(tokens[: len(before)])
            prediction = _predicted.pop(prompt, prompt)
            context = Context(next(self._ids), tokens, len(before), _GREEDY, Streams(0), prediction=prediction)
            request = _Request(context, text)
            self._live.append(request)
        request.row = text.astype(np.int32)
        request.absent = 0
        return request

    def _learn(self, rows: Sequence[_Request | None], sampled: Sequence[Sequence[int]], seconds: float) -> None:
        """What the pass said of every row that has new tokens."""
        scores = self._scores(rows)
        if scores is None:
            self.unlearned += 1
            return
        batch = sum(request is not None for request in rows)
        timings = Timings(0.0, seconds, 0.0, 0.0, max(1, batch), sum(request is None for request in rows))
        contexts, observations = [], []
        for request, new, own in zip(rows, sampled, scores, strict=True):
            if request is not None:
                contexts.append(request.context)
                observations.append(Observation(_step(request, new, timings), own))
        if contexts:
            self.inner.observe(contexts, observations)

    def _scores(self, rows: Sequence[_Request | None]) -> list[Scores] | None:
        """By row; None where logits are wanted and there is another number of them than was drafted for."""
        if not self.inner.needs.rounds:
            return [Scores(torch.empty(0, self.vocab_size)) for _ in rows]
        sizes = [1 + (len(request.chain) if request is not None else 0) for request in rows]
        if self._logits is None or self._logits.shape[0] != sum(sizes):
            return None
        return [Scores(part) for part in self._logits.split(sizes)]

    def _part(self, rows: Sequence[_Request | None]) -> None:
        """From requests that are not here any more: their texts are whole, which some learn from."""
        here = {id(request) for request in rows if request is not None}
        gone = [request for request in self._live if id(request) not in here]
        for request in gone:
            request.absent += 1
            if request.absent > self._patience:
                end = Step(request.context.id, 0, Draft.empty(), Verdict((), 0), (), _OVER, "stop")
                self.inner.observe([request.context], [Observation(end, Scores(torch.empty(0, self.vocab_size)))])
                self.inner.forget(request.context)
                self._live.remove(request)

    def _chains(self, rows: Sequence[_Request | None]) -> list[list[int]]:
        asked = [request for request in rows if request is not None]
        room = [min(self.depth, self.max_length - len(request.row) - 1) for request in asked]
        contexts, budgets = [request.context for request in asked], [max(0, _WIDER * each) for each in room]
        drafts = self.inner.propose(contexts, budgets) if asked else []
        for request, draft, most in zip(asked, drafts, room, strict=True):
            request.chain = best_path(draft, most)
        return [list(request.chain) if request is not None else [] for request in rows]


def best_path(draft: Draft, most: int) -> list[int]:
    """The tokens of the path that promises most: the largest sum of its nodes' probabilities, ``most`` nodes long.

    Where nodes have no scores, the longest path; the first on ties.
    """
    probabilities = [1.0] * len(draft) if draft.scores is None else draft.scores.exp().tolist()
    promised: list[float] = []
    best = -1
    for node, (parent, probability) in enumerate(zip(draft.parents, probabilities, strict=True)):
        promised.append(probability + (promised[parent] if parent >= 0 else 0.0))
        if draft.depths[node] <= most and (best < 0 or promised[node] > promised[best]):
            best = node
    return [draft.ids[node] for node in draft.path(best)]


def _step(request: _Request, new: Sequence[int], timings: Timings) -> Step:
    """What the pass did with the chain: all new tokens but the last were drafted."""
    tokens, chain = tuple(int(token) for token in new), request.chain
    accepted = len(tokens) - 1
    context = request.context
    position = len(context.tokens) - len(tokens) - context.prompt_length
    return Step(
        context.id, position, Draft.chain(chain) if chain else Draft.empty(),
        Verdict(tuple(range(accepted)), tokens[-1]), tokens, timings,
    )  # fmt: skip


def _built(given: Mapping[str, Any], depth: int, vocab_size: int) -> Any:
    """The proposer of vLLM's additional_config, drafting chains of ``depth`` unless it says otherwise."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f'additional_config["{OPTIONS}"] must be a speculative configuration, got {given!r}')
    method = given.get("method", "mixture")
    members = given.get("members", _USUAL) if method == "mixture" else ()
    for name in (method, *(each.get("method") if isinstance(each, Mapping) else None for each in members)):
        if name not in METHODS:
            raise InvalidRequest(f"method {name!r} does not draft inside vLLM; those that do: {', '.join(METHODS)}")
    if "num_speculative_tokens" in given or "control" in given:
        raise InvalidRequest("how much to draft is vLLM's to say: num_speculative_tokens in its speculative_config")
    config = dict(_chained({**given, "method": method}, depth))
    if method == "mixture":
        config["members"] = [_chained(member, depth) for member in members]
    target = cast("Model", _Vocabulary(vocab_size))
    return Builder(target, None, None, _no_model).build(SpeculativeConfig.of(config))


def _chained(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """One continuation of every token, as deep as the chain may be, where the configuration does not say."""
    usual = {"top_k": 1, "num_steps": depth}
    method = find(str(config["method"]))
    known = {f.name for f in fields(method.config)} if method is not None else set()
    return {key: value for key, value in usual.items() if key in known} | dict(config)


def _no_model(path: str | Path) -> NoReturn:
    raise ModelLoadError(f"{path}: proposers inside vLLM have no model of their own; let vLLM load it (draft_model)")
