"""The matrices that an adapter adds to parameters with the matrices of all experts (PEFT's ``target_parameters``).

PEFT flattens both halves: A is [experts * rank, in], with an expert's rows beside each other, and B is
[out, rank * experts], with a column of each expert in turns. If it mistook inputs for outputs, A and B are swapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.lora.file import AdapterFile
from foretoken.models.formats.lora.modules import expert_names
from foretoken.models.formats.lora.settings import LoraSettings


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A parameter with one matrix of each expert.

    Attributes:
        module: name of the module of all experts, relative to the prefix of a decoder's names.
        name: the parameter's.
        kind: the experts' product that it belongs to.
        rows: outputs.
        columns: inputs.
        count: number of experts.
        in_turns: whether rows of gate and up are stored in turns (gpt-oss).
        layout: ``module`` relative to its layer's prefix.
        inputs_first: whether PEFT treats it as [experts, out, in] though it is [experts, in, out].
    """

    module: str
    name: str
    kind: Literal["expert_up", "expert_down"]
    rows: int
    columns: int
    count: int
    in_turns: bool
    inputs_first: bool
    layout: str

    @property
    def full_name(self) -> str:
        """Its name in ``target_parameters``."""
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
    """Returns, for each expert, down [rank, in] and up [out, rank] in parts, without their scale.

    Raises ModelLoadError if the matrices have other shapes, or do not hold finite floats.
    """
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
