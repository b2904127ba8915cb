"""The LoRA adapters of a model by the names that requests choose."""

from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from typing import Any

from foretoken.core.checks import shown
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model


class LoadedAdapters:
    """Names of adapters, and the keys under which the model has them.

    Every load has a unique key. Caches of prefixes and of hidden states use it, so those of an unloaded adapter never
    serve another one of the same name.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._keys: dict[str, str] = {}
        self._retired: list[str] = []  # keys
        self._loads = count(1)

    @property
    def retired(self) -> bool:
        """Whether there are retired adapters whose memory is not freed yet."""
        return bool(self._retired)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def key(self, name: str) -> str:
        """Returns the key of a name. Raises InvalidRequest for an unknown name."""
        key = self._keys.get(name)  # once, because other threads ask while adapters are replaced
        if key is None:
            raise InvalidRequest(
                f"the LoRA adapter {shown(name)} is not loaded; loaded: {', '.join(self.names) or 'none'}"
            )
        return key

    def check_free(self, name: Any) -> None:
        """Raises InvalidRequest for a name that is not a string or is in use."""
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"the name of a LoRA adapter must be a string that is not empty, got {shown(name)}")
        if name in self._keys:
            raise InvalidRequest(f"there is a LoRA adapter {shown(name)} already; choose another name, or unload it")

    def read(self, folder: Path) -> Any:
        return self._model.read_adapter(folder)

    def add(self, name: str, adapter: Any) -> None:
        """Adds an adapter between two passes. Raises InvalidRequest if the name is in use."""
        self.check_free(name)
        self.replace(name, adapter)

    def replace(self, name: str, adapter: Any) -> None:
        """Adds an adapter between two passes and retires the one of this name, if there is one."""
        key, earlier = f"{name} (load {next(self._loads)})", self._keys.get(name)
        self._model.add_adapter(key, adapter)
        self._keys[name] = key
        if earlier is not None:
            self._retired.append(earlier)

    def retire(self, name: str) -> None:
        """Frees the name of an adapter. Its sequences keep it. Raises InvalidRequest."""
        key = self.key(name)
        del self._keys[name]
        self._retired.append(key)

    def sweep(self, used: Callable[[], Collection[str | None]]) -> None:
        """Removes retired adapters that no sequence uses, between two passes.

        used: Returns the keys of the adapters of all unfinished sequences.
        """
        if not self._retired:
            return
        kept = used()
        for key in [key for key in self._retired if key not in kept]:
            self._retired.remove(key)
            self._model.remove_adapter(key)
