"""The weights of a decoder layer on the device, and its mixers and MLPs, made of torch operators."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.experts import Experts
from foretoken.models.formats.quantize import Matrix, stacked
from foretoken.models.formats.weights import (
    CrossAttentionWeights,
    DecoderLayer,
    DenseMlpWeights,
    ExpertWeights,
    LatentWeights,
    LayerInputEnds,
    LayerInputWeights,
    LayerWeights,
    LinearWeights,
    MatrixStack,
    NormWeight,
    RecurrentWeights,
    SelfAttentionWeights,
)
from foretoken.models.runners.functional import activate, normalize, rotate
from foretoken.models.runners.layout import AttentionSizes, Layout
from foretoken.models.runners.linear import Product, by_fixed_rows, moved, product
from foretoken.models.runners.triton_kernels import expert_kernels, has_kernels, kernels, recurrent_kernels
from foretoken.models.runners.triton_kernels.steps import RecurrentLayer, Steps


class StackProducts:
    """The products of all experts or heads.

    kernels: ``triton_kernels.experts.ExpertStack`` of all matrices if kernels take them: floats on CUDA; else None.
    """

    def __init__(self, stack: MatrixStack, device: torch.device) -> None:
        self.kernels: Any = None
        biases = torch.cat(stack.biases, dim=-1).to(device) if stack.biases else None
        matrices: Iterable[Matrix] = (stacked(stack.read(number)).to(device) for number in range(stack.count))
        if has_kernels(device):
            matrices = read = list(matrices)
            if len(floats := [matrix for matrix in read if isinstance(matrix, Tensor)]) == len(read):
                self.kernels = expert_kernels().ExpertStack(torch.stack(floats), biases)
                matrices = self.kernels.weights
        self._products = [product(m, None if biases is None else biases[number]) for number, m in enumerate(matrices)]

    def __getitem__(self, number: int) -> Product:
        return self._products[number]

    def by_head(self, x: Tensor, any_kernel: bool) -> Tensor:
        """Returns the products of all heads for x [R, heads, in], [R, heads, out]. On CUDA they are one."""
        if self.kernels is not None:
            multiply = partial(_multiply, self.kernels.weights.transpose(1, 2))
            return by_fixed_rows(multiply, x.flatten(1)).unflatten(1, (x.shape[1], -1))
        return torch.stack([p(x[:, head].contiguous(), any_kernel) for head, p in enumerate(self._products)], dim=1)


def _multiply(matrices: Tensor, x: Tensor) -> Tensor:
    """Returns the products of all heads for x [R, heads * in], [R, heads * out]."""
    return torch.bmm(x.unflatten(1, (len(matrices), -1)).transpose(0, 1), matrices).transpose(0, 1).flatten(1)


# The dataclasses of ``formats/weights.py`` with packed products on the device.
TorchLayer = DecoderLayer[Product, StackProducts]
TorchAttention = SelfAttentionWeights[Product]
TorchCross = CrossAttentionWeights[Product]
TorchExperts = ExpertWeights[Product, StackProducts]
TorchLatent = LatentWeights[Product, StackProducts]
TorchMlp = DenseMlpWeights[Product]


def on_device(weights: LayerWeights, device: torch.device) -> TorchLayer:
    """Returns a layer's weights on the device, with packed products."""
    return cast("TorchLayer", _placed(weights, device))


def _placed(weights: Any, device: torch.device) -> Any:
    if isinstance(weights, Tensor):
        return weights.to(device)
    if isinstance(weights, MatrixStack):
        return StackProducts(weights, device)
    if isinstance(weights, LinearWeights):
        return product(stacked(weights.parts).to(device), moved(weights.bias, device))
    if isinstance(weights, ExpertWeights):  # scores are computed in float32
        router = LinearWeights(tuple(part.float() for part in weights.router.parts), weights.router.bias)
        weights = replace(weights, router=router)
    if is_dataclass(weights) and not isinstance(weights, type | Experts):
        return replace(weights, **{f.name: _placed(getattr(weights, f.name), device) for f in fields(weights)})
    return weights


def mlp(a: Architecture, w: TorchMlp, x: Tensor, gated: bool, any_kernel: bool) -> Tensor:
    """Returns the output [rows, H] of an MLP for an input [rows, H]; ``any_kernel`` is that of ``Product``."""
    return w.down(activate(a, w.up(x, any_kernel), gated), any_kernel)


def recurrent(
    a: Architecture, number: int, w: RecurrentWeights[Product], x: Tensor, steps: Steps | None, any_kernel: bool
) -> Tensor:
    """Returns the output [R, H] of layer ``number``'s recurrent mixer for an input [R, H]."""
    kind, sizes = a.stack[number].recurrent, a.recurrence
    assert kind is not None and sizes is not None
    assert steps is not None, "recurrent layers need the order of rows"
    state = {name: getattr(w, name) for name in ("conv", "conv_bias", "decay", "step_bias", "norm", "skip")}
    layer = RecurrentLayer(kind, sizes, a.first(number).recurrent_layers, a.eps, **state)
    rows = w.into(x, any_kernel)
    gates = rows if w.gates is None else w.gates(x, any_kernel)
    mixed: Tensor = recurrent_kernels().mix(layer, rows, gates, steps)
    return w.out(mixed, any_kernel)


def attend_latents(
    a: Architecture,
    number: int,
    w: TorchLatent,
    x: Tensor,
    turns: Sequence[tuple[Tensor, Tensor]],
    g: Layout,
    any_kernel: bool,
) -> Tensor:
    """Returns the output of layer ``number``'s attention for the normed rows ``x`` [R, H].

    Each head has separate products. Latents and rotary keys are cached twice, as keys and as values.
    """
    s, layer = a.latent, a.stack[number]
    assert s is not None
    first = w.into(x, any_kernel)
    queries, latents, keys = first.split((first.shape[1] - s.rank - s.rotated, s.rank, s.rotated), dim=1)
    if w.query_up is not None and w.query_norm is not None:
        queries = w.query_up(_normed(queries, w.query_norm, s.eps), any_kernel)
    plain, rotated = queries.unflatten(1, (a.heads, -1)).split((s.plain, s.rotated), dim=2)
    absorbed = w.absorb.by_head(plain, any_kernel)
    latents = _normed(latents, w.latent_norm, s.eps)
    rotated = torch.cat((rotated, keys[:, None]), dim=1)
    if layer.rope >= 0:
        rotated = rotate(rotated, *turns[layer.rope], a.paired)
    queries_keys = torch.cat((torch.cat((absorbed, latents[:, None]), dim=1), rotated), dim=2)
    mixed = g.attend(number, queries_keys, queries_keys[:, a.heads :], AttentionSizes.of(a, layer), layer.view)
    mixed = mixed.unflatten(1, (a.heads, -1))[..., : s.rank]
    return w.out(w.expand.by_head(mixed, any_kernel).flatten(1), any_kernel)


def _normed(x: Tensor, norm: NormWeight, eps: float) -> Tensor:
    if has_kernels(x.device):
        normed: Tensor = kernels().rms_norm(x, norm.weight, eps)
        return normed
    return F.rms_norm(x.float(), norm.weight.shape, norm.weight, eps).to(x.dtype)


def layer_input(
    a: Architecture, w: LayerInputWeights[Product], hidden: Tensor, inputs: Tensor, any_kernel: bool
) -> Tensor:
    """Returns a layer's addition to the residual stream [rows, H] for its inputs [rows, width]."""
    gated = activate(a, w.gate(hidden, any_kernel), gated=False) * inputs
    return normalize(a, w.up(gated, any_kernel), w.norm)


class TorchLayerInputs:
    """The inputs of all layers.

    Args:
        a: the architecture, which has such inputs.
        w: the weights.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, a: Architecture, w: LayerInputEnds) -> None:
        assert a.layer_inputs is not None
        self._width, self._scale = a.layer_inputs.width, torch.tensor(a.layer_inputs.width**0.5, dtype=dtype)
        self._table, self._norm = w.table.to(device), moved_norm(w.norm, device)
        self._projection: Product = _placed(w.projection, device)

    def __call__(self, a: Architecture, tokens: Tensor, embedded: Tensor, any_kernel: bool) -> Tensor:
        """Returns the inputs [rows, layers, width] for tokens [rows] and their scaled embeddings [rows, H]."""
        projected = (self._projection(embedded, any_kernel) * a.hidden**-0.5).unflatten(-1, (-1, self._width))
        by_token = (F.embedding(tokens, self._table) * self._scale).view_as(projected)
        return (normalize(a, projected, self._norm) + by_token) * 0.5**0.5


def moved_norm(norm: NormWeight | None, device: torch.device) -> NormWeight | None:
    return None if norm is None else NormWeight(norm.weight.to(device), moved(norm.bias, device))
