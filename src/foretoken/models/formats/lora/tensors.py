"""The matrices of an adapter, in the order of the runtime's products.

Some are added to parameters with the matrices of all experts (PEFT's ``target_parameters``). PEFT
flattens both halves: A is [experts * rank, in], with an expert's rows beside each other, and B is
[out, rank * experts], with a column of each expert in turns. If it mistook inputs for outputs, A and B are swapped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.lora.file import AdapterFile, LoraSettings, opened, read_settings
from foretoken.models.formats.lora.modules import (
    LinearModule,
    LoraProduct,
    Product,
    expert_names,
    keys_and_values,
    lora_products,
)
from foretoken.models.formats.quantize import Matrix
from foretoken.models.formats.reader import BASES
from foretoken.models.formats.weight_files import is_finite


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter with one matrix of each expert."""

    module: str  # name of the module of all experts, relative to the prefix of a decoder's names
    name: str  # the parameter's
    kind: Literal["expert_up", "expert_down"]  # the experts' product that it belongs to
    rows: int  # outputs
    columns: int  # inputs
    count: int  # number of experts
    in_turns: bool  # whether rows of gate and up are stored in turns (gpt-oss)
    inputs_first: bool  # whether PEFT treats it as [experts, out, in] though it is [experts, in, out]
    layout: str  # ``module`` relative to its layer's prefix

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


def expert_parameters(a: Architecture, number: int) -> list[ExpertParameter]:
    """Returns the parameters of a layer's experts, under each possible name of their module."""
    e, at = a.stack[number].experts, a.names.layer.format(number)
    if e is None:
        return []
    up, inner = ("gate_up_proj", 2 * e.intermediate) if e.gated else ("up_proj", e.intermediate)
    inputs_first = e.inputs_first and not e.biased  # gpt-oss's module states its layout
    parameters = []
    for name in expert_names(e):
        of = (e.count, e.biased, inputs_first, name)
        parameters.append(ExpertParameter(at + name, up, "expert_up", inner, a.hidden, *of))
        parameters.append(ExpertParameter(at + name, "down_proj", "expert_down", a.hidden, e.intermediate, *of))
    return parameters


def stored_parameters(
    file: AdapterFile, prefix: str, settings: LoraSettings, parameters: list[ExpertParameter]
) -> dict[ExpertParameter, str]:
    """Returns the parameters of one module that an adapter changes, with the names of their matrices.

    PEFT nests modules if it changes several parameters, so only shapes identify the matrices of a parameter. Raises
    ModelLoadError if a pair of matrices fits no parameter.
    """
    result: dict[ExpertParameter, str] = {}
    module = prefix + parameters[0].module
    for stored in (module, f"{module}.base_layer"):
        if stored not in file.modules:
            continue
        columns, rows = file.shape(stored, "A")[-1], file.shape(stored, "B")[0]
        fitting = [p for p in parameters if p not in result and {p.rows, p.columns} == {rows, columns}]
        fitting.sort(key=lambda p: (rows, columns) != _halves(p, settings))
        if not fitting:
            raise file.wrong(f"matrices of {stored!r} for {columns} inputs and {rows} outputs, which no parameter has")
        result[fitting[0]] = stored
    return result


def _halves(p: ExpertParameter, settings: LoraSettings) -> tuple[int, int]:
    """Returns the outputs of B and the inputs of A by the rules of the library that wrote the adapter."""
    return (p.columns, p.rows) if _swapped(p, settings) else (p.rows, p.columns)


def _swapped(p: ExpertParameter, settings: LoraSettings) -> bool:
    return p.inputs_first if settings.outputs_first else not (p.inputs_first or p.in_turns)


def read_parameter(
    file: AdapterFile, prefix: str, settings: LoraSettings, p: ExpertParameter, stored: str
) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Returns, for each expert, down [rank, in] and up [out, rank] in parts, without their scale."""
    rank = settings.rank(prefix + p.full_name)
    swapped = _swapped(p, settings)
    if p.rows != p.columns:
        swapped = file.shape(stored, "B")[0] != p.rows
    outputs, inputs = (p.columns, p.rows) if swapped else (p.rows, p.columns)
    down = file.matrix(stored, "A", (p.count * rank, inputs)).unflatten(0, (p.count, rank))
    up = file.matrix(stored, "B", (outputs, rank * p.count)).unflatten(1, (rank, p.count))
    halves: list[tuple[Tensor, tuple[Tensor, ...]]] = []
    for expert in range(p.count):
        first, last = down[expert], up[:, :, expert]
        if swapped:
            first, last = last.t(), first.t()
        halves.append(
            (first.contiguous(), (last[0::2], last[1::2]) if p.in_turns and p.kind == "expert_up" else (last,))
        )
    return halves


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A low-rank product that is added to one of a layer's: up (down x)."""

    down: Tensor  # float32 [rank, in]; the rank is the sum of the modules' ranks
    up: tuple[Matrix, ...]  # float32 [out, rank] in the product's parts, scale included


AdapterLayer = Mapping[Product, LowRank | Sequence[LowRank | None]]
"""What an adapter adds to the products of one layer; those of heads and experts are sequences."""


def read_adapter(folder: Path, architecture: Architecture) -> list[AdapterLayer]:
    """Reads an adapter in PEFT's format for a decoder. Returns its matrices by layer."""
    settings = read_settings(folder)
    if architecture.multiplied:
        raise ModelLoadError(
            f"the adapter in {folder} is for the weights of the original checkpoint, and this file of type "
            f"{architecture.family!r} has them multiplied by factors; run the checkpoint instead of the GGUF file"
        )
    with opened(folder) as file:
        return _Reader(settings, AdapterFile(folder, file), architecture).layers()


class _Reader:
    """Reads the matrices of one adapter."""

    def __init__(self, settings: LoraSettings, file: AdapterFile, a: Architecture) -> None:
        self._settings, self._file, self._a = settings, file, a
        layers = range(a.layers)
        self._products = [tuple(lora_products(a, layer)) for layer in layers]
        self._heads = [keys_and_values(a, layer) for layer in layers]
        self._parameters = [expert_parameters(a, layer) for layer in layers]
        modules = [m for layer in self._products for product in layer for m in product.modules]
        self._known = {m.name: m for m in (*modules, *(m for m in self._heads if m is not None))}
        self._stacked = {f"{p.module}{end}" for layer in self._parameters for p in layer for end in ("", ".base_layer")}
        self._prefix = self._prefix_of(min(file.modules))
        self._stored = [self._stored_parameters(layer) for layer in self._parameters]
        self._check_names()

    def layers(self) -> list[AdapterLayer]:
        return [self._layer(number) for number in range(self._a.layers)]

    def _layer(self, number: int) -> AdapterLayer:
        products: dict[Product, LowRank | list[LowRank | None]] = {}
        for product in self._products[number]:
            added = self._product(product)
            if added is not None and product.expert is None:
                if product.kind in products:
                    raise self._twice(product.modules[0].name)
                products[product.kind] = added
            elif added is not None:
                self._add_expert(products, number, product.kind, product.expert or 0, added)
        for parameter, stored in self._stored[number].items():
            for expert, added in enumerate(self._experts(parameter, stored)):
                self._add_expert(products, number, parameter.kind, expert, added)
        module = self._heads[number]
        if module is not None and (pair := self._pair(module)) is not None:
            products["absorb"], products["expand"] = self._by_head(*pair)
        return products

    def _add_expert(
        self, products: dict[Product, Any], number: int, kind: Product, expert: int, added: LowRank
    ) -> None:
        experts = self._a.stack[number].experts
        stack = products.setdefault(kind, [None] * (0 if experts is None else experts.count))
        if stack[expert] is not None:
            raise self._twice(f"an expert of layer {number}")
        stack[expert] = added

    def _twice(self, name: str) -> ModelLoadError:
        return self._file.wrong(f"the matrices of {name!r} twice, under different names")

    def _by_head(self, down: Tensor, up: Tensor) -> tuple[list[LowRank | None], list[LowRank | None]]:
        """Returns the additions to ``LatentWeights.absorb`` and ``expand`` of an adapter for the matrix of both."""
        s = self._a.latent
        assert s is not None
        back = down.t().contiguous()
        parts = [head.split((s.plain, s.value)) for head in up.unflatten(0, (self._a.heads, -1))]
        absorb: list[LowRank | None] = [LowRank(keys.t().contiguous(), (back,)) for keys, _ in parts]
        return absorb, [LowRank(down, (values,)) for _, values in parts]

    def _experts(self, parameter: ExpertParameter, stored: str) -> Iterator[LowRank]:
        scale = self._settings.scale(self._prefix + parameter.full_name)
        for down, up in read_parameter(self._file, self._prefix, self._settings, parameter, stored):
            yield LowRank(down, tuple(self._scaled(stored, part, scale) for part in up))

    def _stored_parameters(self, parameters: list[ExpertParameter]) -> dict[ExpertParameter, str]:
        result: dict[ExpertParameter, str] = {}
        for module in dict.fromkeys(p.module for p in parameters):
            of_module = [p for p in parameters if p.module == module]
            result |= stored_parameters(self._file, self._prefix, self._settings, of_module)
        return result

    def _check_names(self) -> None:
        """Raises ModelLoadError unless the tensors are those that the settings name."""
        stored, settings, prefix = self._file.modules, self._settings, self._prefix
        for module in stored:
            if self._prefix_of(module) != prefix:
                raise self._file.wrong(f"modules under two prefixes, such as {min(stored)!r} and {module!r}")
        if settings.target_modules is None and settings.target_parameters is None:
            return
        parameters = {prefix + p.full_name: p for layer in self._stored for p in layer}
        modules = {module for module in stored if module.removeprefix(prefix) in self._known}
        layouts = {"", *(self._known[name.removeprefix(prefix)].layout for name in modules)}
        names = [prefix + name for name, module in self._known.items() if module.layout in layouts]
        expected = settings.targets(names) | {name for name in names if settings.names_parameter(f"{name}.weight")}
        layouts = {p.layout for p in parameters.values()}
        every = [p for layer in self._parameters for p in layer if p.layout in layouts]
        expected |= {name for p in every if settings.names_parameter(name := prefix + p.full_name)}
        if missing := sorted(expected - modules - parameters.keys()):
            raise self._file.wrong(f"no tensors of {missing[0]!r}, which target_modules names; is it complete?")
        if extra := sorted((modules | parameters.keys()) - expected):
            raise self._file.wrong(f"tensors of {extra[0]!r}, which target_modules does not name")

    def _prefix_of(self, module: str) -> str:
        """Returns the prefix of a module's name. Raises ModelLoadError for a module that no adapter may change."""
        for base in sorted({self._a.names.base, *BASES}, key=len, reverse=True):
            name = module.removeprefix(base)
            if module.startswith(base) and (name in self._known or name in self._stacked):
                return base
        raise self._file.wrong(
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
        if name not in self._file.modules:
            return None
        rank = self._settings.rank(self._parameter(name))
        down = self._file.matrix(name, "A", (rank, module.columns))
        up = self._file.matrix(name, "B", (module.rows, rank))
        return down, self._scaled(name, up, self._settings.scale(self._parameter(name)))

    def _parameter(self, name: str) -> str:
        """Returns a module's name in the patterns of ranks: that of its parameter if PEFT changed that."""
        return f"{name}.weight" if self._settings.names_parameter(f"{name}.weight") else name

    def _scaled(self, name: str, up: Tensor, scale: float) -> Tensor:
        scaled = up * scale
        if not is_finite(scaled):
            raise self._file.wrong(f"{name!r} scaled beyond float32, by lora_alpha or alpha_pattern")
        return scaled
