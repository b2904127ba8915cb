"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: LoRA adapters that come and go while requests run.

An adapter is read and packed in a thread of its own, and added between two steps. Requests that use an adapter when it
is unloaded keep it; its memory is freed when the last of them ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.formats.checkpoint import resolve
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

    Args:
        worker: Runs the engine.
        model_names: Names of the model itself.
        paths: The adapters that it begins with: paths by name.

    Attributes:
        paths: The adapters: paths by name.
        taken: Further tests of whether a name is taken, by other models behind the same address.
        changing: Is held while adapters change; one for all models behind the same address.
    """

    def __init__(self, worker: Worker, model_names: Sequence[str], paths: dict[str, str]) -> None:
        self._worker, self._model_names, self.paths = worker, model_names, paths
        self.taken: list[Callable[[str], bool]] = []
        self.changing = asyncio.Lock()

    async def load(self, wanted: AdapterToLoad, key: str | None) -> None:
        """Loads an adapter. key: name of the client's key, for the log.

        Raises:
            InvalidRequest: Its name is taken, it cannot be read, or does not fit the model. Nothing is changed.
            ServerUnavailable: The engine does not answer.
        """
        name, llm = wanted.lora_name, self._worker.llm
        async with self.changing:
            self._check_name(wanted)
            try:
                adapter = await asyncio.to_thread(lambda: llm.adapters.read(resolve(wanted.lora_path)))
            except (ModelLoadError, OSError) as error:
                raise InvalidRequest(f"lora_path: {error}", param="lora_path") from error

            def add() -> None:
                llm.adapters.replace(name, adapter)
                self.paths[name] = wanted.lora_path
                self._worker.sweep_adapters()

            await self._worker.between_steps(add)
        _log.warning("the LoRA adapter %s was loaded by %s from %s", name, _by(key), wanted.lora_path)

    async def unload(self, wanted: AdapterToUnload, key: str | None) -> None:
        """Unloads an adapter. key: name of the client's key, for the log.

        Raises:
            InvalidRequest: It is not loaded.
            ServerUnavailable: The engine does not answer.
        """
        name, llm = wanted.lora_name, self._worker.llm

        def remove() -> None:
            llm.adapters.retire(name)
            del self.paths[name]
            self._worker.sweep_adapters()

        async with self.changing:
            await self._worker.between_steps(remove)
        _log.warning("the LoRA adapter %s was unloaded by %s", name, _by(key))

    def _check_name(self, wanted: AdapterToLoad) -> None:
        name = wanted.lora_name
        if name in self._model_names or any(taken(name) for taken in self.taken):
            raise InvalidRequest(f"{name!r} is a name of another model here; choose another lora_name", "lora_name")
        if name in self.paths and not wanted.load_inplace:
            raise InvalidRequest(
                f"there is a LoRA adapter {name!r} already; unload it, or give load_inplace to replace it",
                "lora_name",
            )


def _by(key: str | None) -> str:
    return key or "a client without a key"
