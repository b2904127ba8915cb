"""``/v1/speculation``: what is known about speculation, and changes to it while requests run.

Both happen in the engine's thread between two steps. No change depends on a token of a step, and every draft is
verified whatever drafted it, so texts with a seed stay the same and others keep their distribution.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from foretoken.params import MAX_SPECULATIVE_TOKENS
from foretoken.propose.fallback import FallbackProposer
from foretoken.serve.metrics import Metrics
from foretoken.serve.schema import Body
from foretoken.serve.worker import Worker

_log = logging.getLogger(__name__)


class SpeculationChange(Body):
    """Body of PATCH and POST /v1/speculation. Fields that are left out keep their value.

    Args:
        enabled: Whether anything is drafted. Holds at once, for all requests.
        method: The default method of new requests. Running ones keep theirs.
        max_draft_tokens: Largest draft of a sequence in a step, whatever requests ask for; null is no bound. Holds at
            once.
    """

    model: str | None = None
    enabled: bool | None = None
    method: str | None = None
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] | None = None


class SpeculationState(TypedDict):
    """Answer of /v1/speculation.

    ``paused`` is why the last step had no drafts, null if it had some. ``running`` has the draft lengths of the running
    requests. docs/reference/http.md describes ``controller``, ``costs`` and ``acceptance``.
    """

    object: str
    model: str
    enabled: bool
    method: str
    methods: list[str]
    max_draft_tokens: int | None
    paused: str | None
    running: int
    controller: dict[str, Any]
    costs: dict[str, Any] | None
    acceptance: dict[str, Any]


class SpeculationControl:
    """Describes and changes the speculation of one worker.

    Args:
        worker: Runs the engine.
        metrics: Counts its steps.
        model: Name of the model.
    """

    def __init__(self, worker: Worker, metrics: Metrics, model: str) -> None:
        self._worker, self._metrics, self._model = worker, metrics, model
        self._enabled, self._bound = True, worker.limited.limit

    async def state(self) -> SpeculationState:
        """Returns what is known. Raises ServerUnavailable."""
        return await self._worker.between_steps(self._state)

    async def change(self, wanted: SpeculationChange, key: str | None) -> SpeculationState:
        """Makes a change and returns what is known then. key: name of the client's key, for the log.

        Raises:
            InvalidRequest: The method is not loaded; nothing is changed.
            ServerUnavailable: The engine does not answer.
        """

        def apply() -> SpeculationState:
            self._apply(wanted)
            return self._state()

        state = await self._worker.between_steps(apply)
        bound = state["max_draft_tokens"]
        _log.warning(
            "speculation was changed by %s: %s, method %s, max_draft_tokens %s",
            key or "a client without a key",
            "on" if state["enabled"] else "off",
            state["method"],
            bound,
        )
        return state

    def _apply(self, wanted: SpeculationChange) -> None:
        worker = self._worker
        if wanted.method is not None and wanted.method != worker.llm.methods[0]:
            worker.llm.use_method(wanted.method)
        if wanted.enabled is not None:
            self._enabled = wanted.enabled
        if "max_draft_tokens" in wanted.model_fields_set:
            self._bound = wanted.max_draft_tokens
        worker.limited.limit = self._bound if self._enabled else 0
        proposer = worker.llm.proposer_of(worker.llm.methods[0])
        if isinstance(proposer, FallbackProposer) and (wanted.method or wanted.enabled):
            proposer.enable()

    def _state(self) -> SpeculationState:
        worker, engine = self._worker, self._worker.engine
        costs = worker.limited.costs
        return {
            "object": "speculation",
            "model": self._model,
            "enabled": self._enabled,
            "method": worker.llm.methods[0],
            "methods": list(worker.llm.methods),
            "max_draft_tokens": self._bound,
            "paused": self._paused(),
            "running": len(engine.running),
            "controller": worker.limited.describe(),
            "costs": None if costs is None else costs.describe(),
            "acceptance": self._metrics.acceptance(),
        }

    def _paused(self) -> str | None:
        llm = self._worker.llm
        proposer = llm.proposer_of(llm.methods[0])
        if isinstance(proposer, FallbackProposer) and proposer.disabled:
            return "the method failed and is disabled; the log says why"
        return self._worker.limited.pause
