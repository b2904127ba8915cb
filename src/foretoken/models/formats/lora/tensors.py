"""The matrices of an adapter, in the order of the runtime's products."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.finite import check_finite, is_finite
from foretoken.models.formats.lora.modules import LinearModule, LoraProduct, Product, lora_products
from foretoken.models.formats.lora.settings import LoraSettings, read_settings
from foretoken.models.formats.quantize import Matrix
from foretoken.models.formats.reader import BASES
from foretoken.models.formats.weight_files import PICKLES

TENSORS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank product that is added to one of a layer's: up (down x).

    Attributes:
        down: float32 [rank, in]; the rank is the sum of those of the product's modules.
        up: float32 [out, rank] in parts, as the matrices of the product; the scale is in it.
    """

    down: Tensor
    up: tuple[Matrix, ...]


AdapterLayer = Mapping[Product, LowRank]
"""What an adapter adds to the products of one layer."""


def read_adapter(folder: Path, architecture: Architecture) -> list[AdapterLayer]:
    """Reads an adapter in PEFT's format for a decoder. Returns what it adds to each layer.

    Raises:
        ModelLoadError: a file is missing or damaged, its weights are pickles, or they do not fit the model. Nothing
            that the adapter has is left out.
    """
    settings = read_settings(folder)
    with _opened(folder) as file:
        return _Reader(folder, settings, file, architecture).layers()


class _Reader:
    """Reads the matrices of one adapter.

    Args:
        folder: the adapter.
        settings: its settings.
        file: its open tensors.
        a: the decoder.
    """

    def __init__(self, folder: Path, settings: LoraSettings, file: Any, a: Architecture) -> None:
        self._folder, self._settings, self._file, self._a = folder, settings, file, a
        self._products = [tuple(lora_products(a, layer)) for layer in range(a.layers)]
        self._known = {m.name: m for layer in self._products for product in layer for m in product.modules}
        self._prefix = ""
        self._check_names(file.keys())

    def layers(self) -> list[AdapterLayer]:
        """Returns what the adapter adds to each layer."""
        return [self._layer(products) for products in self._products]

    def _layer(self, products: Iterable[LoraProduct]) -> AdapterLayer:
        found: dict[Product, LowRank] = {}
        for product in products:
            added = self._product(product)
            if added is not None and product.kind in found:
                raise self._wrong(f"{product.modules[0].name!r} beside the same module under another name")
            if added is not None:
                found[product.kind] = added
        return found

    def _check_names(self, names: Iterable[str]) -> None:
        """Finds the prefix of the modules' names.

        Raises:
            ModelLoadError: the tensors are not those that the settings name.
        """
        stored: dict[str, set[str]] = {}
        for name in sorted(names):
            if (parsed := _NAME.fullmatch(name)) is None:
                raise self._wrong(f"the tensor {name!r}, which is not supported: LoRA is computed on linear layers")
            stored.setdefault(parsed["module"], set()).add(parsed["part"])
        if not stored:
            raise self._wrong("no tensors")
        self._prefix = self._prefix_of(min(stored))
        for module, parts in stored.items():
            if self._prefix_of(module) != self._prefix:
                raise self._wrong(f"modules under two prefixes, such as {min(stored)!r} and {module!r}")
            if len(parts) < 2:
                raise self._wrong(f"only one of the two matrices of {module!r}")
        wanted = set(stored)
        if self._settings.target_modules is not None:
            layouts = {"", *(self._known[name.removeprefix(self._prefix)].layout for name in stored)}
            known = (name for name, module in self._known.items() if module.layout in layouts)
            wanted = self._settings.targets(self._prefix + name for name in known)
        if missing := sorted(wanted - stored.keys()):
            raise self._wrong(f"no tensors of {missing[0]!r}, which target_modules names; is it complete?")
        if extra := sorted(stored.keys() - wanted):
            raise self._wrong(f"tensors of {extra[0]!r}, which target_modules does not name")

    def _prefix_of(self, module: str) -> str:
        """Returns the prefix of a module's name. Raises ModelLoadError for a module that no adapter may change."""
        for base in sorted({self._a.names.base, *BASES}, key=len, reverse=True):
            if module.startswith(base) and module.removeprefix(base) in self._known:
                return base
        raise self._wrong(
            f"the module {module!r}, and adapters may only change linear layers of this model's layers "
            f"(type {self._a.family!r}), such as {min(self._known, default='none')!r}"
        )

    def _product(self, product: LoraProduct) -> LowRank | None:
        pairs = [self._pair(module) for module in product.modules]
        ranks = [0 if pair is None else len(pair[0]) for pair in pairs]
        if not sum(ranks):
            return None
        down = torch.cat([pair[0] for pair in pairs if pair is not None])
        parts, first = [], 0
        for module, pair, rank in zip(product.modules, pairs, ranks, strict=True):
            up = torch.zeros(module.rows, sum(ranks))
            if pair is not None:
                up[:, first : first + rank] = pair[1]
            parts.append(up)
            first += rank
        return LowRank(down, product.arrange(tuple(parts)))

    def _pair(self, module: LinearModule) -> tuple[Tensor, Tensor] | None:
        """Returns a module's matrices [rank, in] and [out, rank], the second one scaled; None if it has none."""
        name = self._prefix + module.name
        rank = self._settings.rank(name)
        down = self._matrix(f"base_model.model.{name}.lora_A.weight", (rank, module.columns))
        up = self._matrix(f"base_model.model.{name}.lora_B.weight", (module.rows, rank))
        if down is None or up is None:
            return None
        scaled = up * self._settings.scale(name)
        if not is_finite(scaled):
            raise self._wrong(f"{name!r} scaled beyond float32, by lora_alpha or alpha_pattern")
        return down, scaled

    def _matrix(self, name: str, shape: tuple[int, int]) -> Tensor | None:
        if name not in self._file.keys():  # noqa: SIM118 (not a mapping)
            return None
        stored = tuple(self._file.get_slice(name).get_shape())
        if stored != shape:
            raise self._wrong(f"{name!r} of the shape {stored}; model and adapter_config.json say {shape}")
        tensor: Tensor = self._file.get_tensor(name)
        if not tensor.is_floating_point():
            raise self._wrong(f"{name!r} of {tensor.dtype}; expected floats")
        tensor = tensor.float()  # first, because numbers of float64 may be too large
        check_finite(name, tensor, str(self._folder))
        return tensor

    def _wrong(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"the adapter in {self._folder} has {what}")


def _opened(folder: Path) -> Any:
    """Opens an adapter's tensors. Raises ModelLoadError."""
    from safetensors import safe_open

    file = folder / TENSORS
    if not file.is_file():
        if pickles := sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
            raise ModelLoadError(
                f"{folder} has its weights only as a pickle ({pickles[0]}), which can run code when it is read; where "
                "you trust it, save the adapter again: PeftModel.from_pretrained(MODEL, SRC).save_pretrained(DST)"
            )
        raise ModelLoadError(f"{folder} has no {TENSORS}; expected the folder of a PEFT adapter")
    try:
        return safe_open(str(file), framework="pt")
    except Exception as error:  # safetensors raises its own and OSError kinds
        raise ModelLoadError(f"{file} is truncated or not a safetensors file ({error}); save it again") from error
