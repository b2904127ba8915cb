"""Model-free proposers as a custom proposer class of vLLM.

    LLM(model, speculative_config={"method": "custom_class", "model": "foretoken.interop_vllm.VllmProposer",
        "num_speculative_tokens": 8}, additional_config={"foretoken": {"method": "suffix"}})

vLLM passes only the sequences of a batch by row and the tokens of the last forward pass (0.32:
``v1/spec_decode/custom_class_proposer.py``). So requests are identified by their tokens, and a request that is missing
from the batch counts as finished. Logits, for proposers that learn from them, are captured in vLLM's model. vLLM's
drafts are chains: the path of a tree with the largest sum of probabilities. It verifies them as fixed candidates.
"""

import math
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
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Model, Scores
from foretoken.propose.base import Observation
from foretoken.propose.per_request import FallbackProposer
from foretoken.speculation import Builder, SpeculativeConfig, find

METHODS = ("ngram", "suffix", "recycling", "prediction", "mixture")
OPTIONS = "foretoken"  # the key of vLLM's additional_config that holds the method and its keys
_GREEDY = SamplingLaw(temperature=0.0)  # vLLM does not pass sampling parameters; the law affects learned state only
_NO_TIME = Timings(0.0, 0.0, 0.0, 0.0, 1)
_DEFAULT_MEMBERS = ({"method": "suffix"}, {"method": "recycling"})  # members of a mixture
_NODES_PER_TOKEN = 2  # nodes that a proposer may draft for each token of the chain, so that a path can be chosen

Ids = NDArray[np.int32]
_predictions: dict[tuple[int, ...], tuple[int, ...]] = {}


def predict(prompt: Sequence[int], text: Sequence[int]) -> None:
    """Registers the predicted output of a prompt, both as token ids, before the request is made.

    For the method "prediction" with vLLM's engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0). The predicted
    output of other requests is their prompt, which suits prompts that contain a text to edit.
    """
    _predictions[tuple(prompt)] = tuple(text)


@dataclass(eq=False, slots=True)
class _Request:
    """One request of vLLM."""

    context: Context
    row: Ids
    chain: list[int] = field(default_factory=list)
    absent: int = 0


@dataclass(frozen=True)
class _DraftVocabulary:
    """The target's vocabulary, for model-free proposers."""

    vocab_size: int


class VllmProposer:
    """vLLM's custom proposer class. See the module.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        InvalidRequest: The configured method cannot draft inside vLLM.
    """

    def __init__(self, vllm_config: Any) -> None:
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        self.depth = int(speculative.num_speculative_tokens)
        self.max_length, self.vocab_size = int(model.max_model_len), int(model.get_vocab_size())
        options = (vllm_config.additional_config or {}).get(OPTIONS, {})
        self.inner = FallbackProposer(_built(options, self.depth, self.vocab_size))
        # With pipeline parallelism the batches take turns, and each call has one of them.
        stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self._max_absent = 0 if stages == 1 else 2 * stages
        self._live: list[_Request] = []
        self._rows: list[_Request | None] = []  # rows of the last call
        self._logits: Tensor | None = None
        self._returned_at = perf_counter()
        self._ids = count(1)
        self.unlearned = 0  # calls whose logits did not have the expected number of rows

    @property
    def num_requests(self) -> int:
        """Number of requests that are not known to be finished."""
        return len(self._live)

    def load_model(self, model: Any) -> None:
        """Called once by vLLM with the target. Nothing is loaded, but logits are captured for methods that learn."""
        if not self.inner.needs.live_steps:
            return
        compute = getattr(model, "compute_logits", None)
        if compute is None:
            raise InvalidRequest(f"{type(model).__name__} shows no logits, from which {self.inner.name} learns")

        def captured(*args: Any, **options: Any) -> Any:
            self._logits = compute(*args, **options)
            return self._logits

        model.compute_logits = captured

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns at most ``num_speculative_tokens`` draft tokens for each row; none during prefill.

        Args:
            sampled_token_ids: Tokens of the last forward pass by row.
            num_tokens_no_spec: [rows]. Length of each text, these tokens included.
            token_ids_cpu: [rows, max_model_len]. The texts.
            slot_mappings: Unused.
        """
        seconds = perf_counter() - self._returned_at
        texts = [token_ids_cpu[i, : int(num_tokens_no_spec[i])] for i in range(len(sampled_token_ids))]
        rows = [self._request_of(i, text, len(sampled_token_ids[i])) for i, text in enumerate(texts)]
        self._learn(rows, sampled_token_ids, seconds)
        self._finish_absent(rows)
        self._rows, self._logits = rows, None
        chains = self._chains(rows)
        self._returned_at = perf_counter()
        return chains

    def _request_of(self, row: int, text: Ids, new: int) -> _Request | None:
        """Returns the request whose sequence has grown by ``new`` tokens to ``text``, else a new request."""
        if not new:
            return None
        before = text[: len(text) - new]
        last = self._rows[row] if row < len(self._rows) else None
        for request in (last, *self._live):  # requests with equal tokens cannot be distinguished
            if request is not None and len(request.row) == len(before) and np.array_equal(request.row, before):
                request.context.tokens.extend(text[len(before) :].tolist())
                break
        else:
            tokens = text.tolist()
            prompt = tuple(tokens[: len(before)])
            prediction = _predictions.pop(prompt, prompt)
            context = Context(
                next(self._ids), tokens, len(before), _GREEDY, Streams(0), depth=self.depth, prediction=prediction
            )
            request = _Request(context, text)
            self._live.append(request)
        request.row = text.astype(np.int32)
        request.absent = 0
        return request

    def _learn(self, rows: Sequence[_Request | None], sampled: Sequence[Sequence[int]], seconds: float) -> None:
        """Passes the step's outputs and logits of every row with new tokens to the proposer."""
        scores = self._scores(rows)
        if scores is None:
            self.unlearned += 1
            return
        batch = sum(request is not None for request in rows)
        timings = Timings(0.0, seconds, 0.0, 0.0, max(1, batch), sum(request is None for request in rows))
        contexts, observations = [], []
        for request, new, row_scores in zip(rows, sampled, scores, strict=True):
            if request is not None:
                contexts.append(request.context)
                observations.append(Observation(_step(request, new, timings), row_scores))
        if contexts:
            self.inner.observe(contexts, observations)

    def _scores(self, rows: Sequence[_Request | None]) -> list[Scores] | None:
        """Returns logits by row; None if they are needed and their number does not match the drafts."""
        if not self.inner.needs.live_steps:
            return [Scores(torch.empty(0, self.vocab_size)) for _ in rows]
        sizes = [1 + (len(request.chain) if request is not None else 0) for request in rows]
        if self._logits is None or self._logits.shape[0] != sum(sizes):
            return None
        return [Scores(part) for part in self._logits.split(sizes)]

    def _finish_absent(self, rows: Sequence[_Request | None]) -> None:
        """Ends requests that are missing from the batch. Some proposers learn from finished sequences."""
        here = {id(request) for request in rows if request is not None}
        gone = [request for request in self._live if id(request) not in here]
        for request in gone:
            request.absent += 1
            if request.absent > self._max_absent:
                request.context.finish_reason = "stop"
                self.inner.forget(request.context)
                self._live.remove(request)

    def _chains(self, rows: Sequence[_Request | None]) -> list[list[int]]:
        decoding = [request for request in rows if request is not None]
        lengths = [min(self.depth, self.max_length - len(request.row) - 1) for request in decoding]
        contexts, budgets = [r.context for r in decoding], [max(0, _NODES_PER_TOKEN * length) for length in lengths]
        drafts = self.inner.propose(contexts, budgets) if decoding else []
        for request, draft, length in zip(decoding, drafts, lengths, strict=True):
            request.chain = best_path(draft, length)
        return [list(request.chain) if request is not None else [] for request in rows]


def best_path(draft: Draft, max_length: int) -> list[int]:
    """Returns the tokens of the path with the largest sum of its nodes' probabilities, the first on ties.

    The path has at most ``max_length`` nodes. Nodes without scores have probability 1, so the longest path is taken.
    """
    probabilities = [1.0] * len(draft) if draft.scores is None else [math.exp(score) for score in draft.scores]
    sums: list[float] = []
    best = -1
    for node, (parent, probability) in enumerate(zip(draft.parents, probabilities, strict=True)):
        sums.append(probability + (sums[parent] if parent >= 0 else 0.0))
        if draft.depths[node] <= max_length and (best < 0 or sums[node] > sums[best]):
            best = node
    return [draft.ids[node] for node in draft.path(best)]


def _step(request: _Request, new: Sequence[int], timings: Timings) -> StepOutput:
    """Returns the output of a step: all new tokens except the last were drafted."""
    tokens, chain = tuple(int(token) for token in new), request.chain
    accepted = len(tokens) - 1
    context = request.context
    position = len(context.tokens) - len(tokens) - context.prompt_length
    draft = Draft.chain(chain) if chain else Draft.empty()
    return StepOutput(context.id, position, draft, Verdict(tuple(range(accepted)), tokens[-1]), tokens, timings)


def _built(options: Mapping[str, Any], depth: int, vocab_size: int) -> Any:
    """Returns the proposer of vLLM's additional_config. It drafts chains of ``depth`` unless configured otherwise."""
    if not isinstance(options, Mapping):
        raise InvalidRequest(f'additional_config["{OPTIONS}"] must be a speculative configuration, got {options!r}')
    method = options.get("method", "mixture")
    members = options.get("members", _DEFAULT_MEMBERS) if method == "mixture" else ()
    for name in (method, *(member.get("method") if isinstance(member, Mapping) else None for member in members)):
        if name not in METHODS:
            raise InvalidRequest(f"method {name!r} does not draft inside vLLM; supported: {', '.join(METHODS)}")
    if "num_speculative_tokens" in options or "control" in options:
        raise InvalidRequest("set the draft length in vLLM's speculative_config: num_speculative_tokens")
    config = dict(_chained({**options, "method": method}, depth))
    if method == "mixture":
        config["members"] = [_chained(member, depth) for member in members]
    target = cast("Model", _DraftVocabulary(vocab_size))
    return Builder(target, None, None, _no_model).build(SpeculativeConfig.of(config))


def _chained(config: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Returns ``config`` with defaults for chains: one continuation of every token, up to ``depth``."""
    defaults = {"top_k": 1, "num_steps": depth}
    method = find(str(config["method"]))
    names = {f.name for f in fields(method.config)} if method is not None else set()
    return {key: value for key, value in defaults.items() if key in names} | dict(config)


def _no_model(path: str | Path, **options: Any) -> NoReturn:
    raise ModelLoadError(f"{path}: proposers inside vLLM load no model; let vLLM load it (draft_model)")
