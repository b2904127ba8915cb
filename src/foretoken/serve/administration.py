"""Administration of a running server: ``/v1/speculation``, ``/v1/save_draft`` and LoRA adapters.

Changes happen in the engine's thread between two steps. No change of speculation depends on a token of a step, and
every draft is verified, so texts with a seed stay the same and others keep their distribution. An adapter is read in a
thread of its own. Requests that use an adapter when it is unloaded keep it; its memory is freed when the last of them
ends.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from foretoken.core.errors import InvalidRequest, ModelLoadError, WriteError
from foretoken.models.formats.checkpoint import resolve
from foretoken.params import MAX_SPECULATIVE_TOKENS
from foretoken.propose.per_request import FallbackProposer
from foretoken.serve.metrics import Metrics
from foretoken.serve.schema import Body
from foretoken.serve.worker import Worker

_log = logging.getLogger(__name__)


class AdapterToLoad(Body):
    """Body of POST /v1/load_lora_adapter.

    Args:
        lora_name: Name under which requests choose it.
        lora_path: Its folder on the server, or its hub name.
        load_inplace: Whether it may take the place of an adapter of this name.
        model: The model that it is for, where there are several. None is the first.
    """

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False
    model: str | None = None


class AdapterToUnload(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


class ServedAdapters:
    """The LoRA adapters of one served model.

    Attributes:
        paths: The adapters: paths by name.
        name_in_use: Further tests of whether a name is in use, by other models behind the same address.
        changing: Is held while adapters change; one for all models behind the same address.
    """

    def __init__(self, worker: Worker, model_names: Sequence[str], paths: dict[str, str]) -> None:
        self._worker, self._model_names, self.paths = worker, model_names, paths
        self.name_in_use: list[Callable[[str], bool]] = []
        self.changing = asyncio.Lock()

    async def load(self, request: AdapterToLoad, key: str | None) -> None:
        """Loads an adapter. key: name of the client's key, for the log.

        Raises:
            InvalidRequest: Its name is taken, it cannot be read, or does not fit the model. Nothing is changed.
            ServerUnavailable: The engine does not answer.
        """
        name, llm = request.lora_name, self._worker.llm
        async with self.changing:
            if name in self._model_names or any(in_use(name) for in_use in self.name_in_use):
                raise InvalidRequest(f"{name!r} is a name of another model here; choose another lora_name", "lora_name")
            if name in self.paths and not request.load_inplace:
                raise InvalidRequest(
                    f"there is a LoRA adapter {name!r} already; unload it, or give load_inplace to replace it",
                    "lora_name",
                )
            try:
                adapter = await asyncio.to_thread(lambda: llm.adapters.read(resolve(request.lora_path)))
            except (ModelLoadError, OSError) as error:
                raise InvalidRequest(f"lora_path: {error}", param="lora_path") from error

            def add() -> None:
                llm.adapters.replace(name, adapter)
                self.paths[name] = request.lora_path
                self._worker.sweep_adapters()

            await self._worker.between_steps(add)
        _log.warning("the LoRA adapter %s was loaded by %s from %s", name, _by(key), request.lora_path)

    async def unload(self, request: AdapterToUnload, key: str | None) -> None:
        """Unloads an adapter. key: name of the client's key, for the log.

        Raises:
            InvalidRequest: It is not loaded.
            ServerUnavailable: The engine does not answer.
        """
        name, llm = request.lora_name, self._worker.llm

        def remove() -> None:
            llm.adapters.retire(name)
            del self.paths[name]
            self._worker.sweep_adapters()

        async with self.changing:
            await self._worker.between_steps(remove)
        _log.warning("the LoRA adapter %s was unloaded by %s", name, _by(key))


def _by(key: str | None) -> str:
    return key or "a client without a key"


class SpeculationChange(Body):
    """Body of PATCH and POST /v1/speculation. Omitted fields keep their value.

    Args:
        enabled: Whether drafts are made. Holds at once, for all requests.
        method: The default method of new requests. Running ones keep theirs.
        max_draft_tokens: Largest draft of a sequence in a step, whatever requests ask for; null is no bound. Holds at
            once.
    """

    model: str | None = None
    enabled: bool | None = None
    method: str | None = None
    max_draft_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] | None = None


class DraftToSave(Body):
    """Body of POST /v1/save_draft.

    Args:
        path: Folder on the server to write.
        force: Whether to replace an earlier draft model or head there.
        model: The model whose drafter is saved, where there are several. None is the first.
    """

    path: Annotated[str, Field(min_length=1)]
    force: bool = False
    model: str | None = None


class SavedDraft(TypedDict):
    """Answer of POST /v1/save_draft. ``updates`` is the number of versions that replaced one another while serving."""

    object: str
    path: str
    updates: int


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
    """Describes and changes the speculation of one worker."""

    def __init__(self, worker: Worker, metrics: Metrics, model: str) -> None:
        self._worker, self._metrics, self._model = worker, metrics, model
        self._enabled, self._bound = True, worker.limited.limit

    async def state(self) -> SpeculationState:
        """Returns the state. Raises ServerUnavailable."""
        return await self._worker.between_steps(self._state)

    async def change(self, change: SpeculationChange, key: str | None) -> SpeculationState:
        """Makes a change and returns the new state. key: name of the client's key, for the log.

        Raises:
            InvalidRequest: The method is not loaded; nothing is changed.
            ServerUnavailable: The engine does not answer.
        """

        def apply() -> SpeculationState:
            self._apply(change)
            return self._state()

        state = await self._worker.between_steps(apply)
        switch, bound = "on" if state["enabled"] else "off", state["max_draft_tokens"]
        words = "speculation was changed by %s: %s, method %s, max_draft_tokens %s"
        _log.warning(words, _by(key), switch, state["method"], bound)
        return state

    async def save_draft(self, request: DraftToSave, key: str | None) -> SavedDraft:
        """Saves the drafter that learns, while requests run. key: name of the client's key, for the log.

        Raises InvalidRequest if no drafter learns, or the folder must not or cannot be written.
        """
        try:
            updates = await asyncio.to_thread(self._worker.llm.save_draft, request.path, request.force)
        except WriteError as error:
            raise InvalidRequest(f"path: {error}", param="path") from error
        _log.warning("the adapted draft was saved by %s to %s", _by(key), request.path)
        return {"object": "draft", "path": request.path, "updates": updates}

    def _apply(self, change: SpeculationChange) -> None:
        worker = self._worker
        if change.method is not None and change.method != worker.llm.methods[0]:
            worker.llm.use_method(change.method)
        if change.enabled is not None:
            self._enabled = change.enabled
        if "max_draft_tokens" in change.model_fields_set:
            self._bound = change.max_draft_tokens
        worker.limited.limit = self._bound if self._enabled else 0
        proposer = worker.llm.proposer_of(worker.llm.methods[0])
        if isinstance(proposer, FallbackProposer) and (change.method or change.enabled):
            proposer.enable()

    def _state(self) -> SpeculationState:
        worker, engine = self._worker, self._worker.engine
        costs, proposer = worker.limited.costs, worker.llm.proposer_of(worker.llm.methods[0])
        pause = worker.limited.pause
        if isinstance(proposer, FallbackProposer) and proposer.disabled:
            pause = "the method failed and is disabled; the log says why"
        return {
            "object": "speculation",
            "model": self._model,
            "enabled": self._enabled,
            "method": worker.llm.methods[0],
            "methods": list(worker.llm.methods),
            "max_draft_tokens": self._bound,
            "paused": pause,
            "running": len(engine.running),
            "controller": worker.limited.describe(),
            "costs": None if costs is None else costs.describe(),
            "acceptance": self._metrics.acceptance(),
        }
