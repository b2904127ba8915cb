"""Weights of heads as runners take them, and products with matrices outside their layers."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.formats.quantize import Matrix, Quantizer
from foretoken.models.formats.weights import (
    DecoderLayer,
    DenseMlpWeights,
    LayerWeights,
    LinearWeights,
    NormWeight,
    SelfAttentionWeights,
)
from foretoken.models.runners.base import Runner
from foretoken.models.runners.linear import product
from foretoken.models.runners.native.product import NativeProduct


def layer_weights(
    tensors: Mapping[str, Tensor], index: int, dtype: torch.dtype, quantizer: Quantizer | None = None
) -> LayerWeights:
    """Returns the weights of layer ``index``; their shapes were checked when the head was read."""

    def matrices(*names: str) -> tuple[Matrix, ...]:
        weights = [tensors[f"{name}.weight"] for name in names]
        return tuple(weight.to(dtype) if quantizer is None else quantizer(weight) for weight in weights)

    at = f"layers.{index}."
    qkv = [f"{at}self_attn.{part}_proj" for part in "qkv"]
    biased = all(f"{name}.bias" in tensors for name in qkv)
    bias = torch.cat([tensors[f"{name}.bias"] for name in qkv]).to(dtype) if biased else None
    attention = SelfAttentionWeights(
        qkv=LinearWeights(matrices(*qkv), bias),
        q_norm=norm_weight(tensors, f"{at}self_attn.q_norm"),
        k_norm=norm_weight(tensors, f"{at}self_attn.k_norm"),
        out=LinearWeights(matrices(f"{at}self_attn.o_proj")),
    )
    mlp = DenseMlpWeights(
        up=LinearWeights(matrices(f"{at}mlp.gate_proj", f"{at}mlp.up_proj")),
        down=LinearWeights(matrices(f"{at}mlp.down_proj")),
    )
    return DecoderLayer(
        norm=norm_weight(tensors, f"{at}input_layernorm"),
        attention=attention,
        after_mixer=None,
        mlp_norm=norm_weight(tensors, f"{at}post_attention_layernorm"),
        mlp=mlp,
        after_mlp=None,
    )


def without_matrices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a head's tensors without the matrices that a runner has packed."""
    return {name: tensor for name, tensor in tensors.items() if tensor.ndim == 1 or name.startswith("embed_tokens")}


def norm_weight(tensors: Mapping[str, Tensor], name: str) -> NormWeight | None:
    """Returns a norm without a bias; None if no tensor has this name."""
    weight = tensors.get(f"{name}.weight")
    return None if weight is None else NormWeight(weight.float())


class TargetHead:
    """The vocabulary head of a target, for heads without their own: normed states [rows, H] -> float32 [rows, V]."""

    def __init__(self, target: Model) -> None:
        self._target = target

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._target.unembed(hidden)

    def lend(self, runner: Runner) -> bool:
        """Makes it the head of ``runner``. Returns whether both are on compiled kernels, so that this is possible."""
        return isinstance(self._target, Decoder) and runner.borrow_head(self._target.runner)


class HeadProduct:
    """A linear layer, ``x @ weight.T + bias``.

    The compiled kernels compute it if they can. torch's threads spin after their work on the cores that the kernels
    need, which made the target's next pass an eighth longer (two Zen 5 cores, 1.2 B parameters).

    Args:
        weight: [out, in].
        bias: [out]; None for none.
        device: device of the computation.
        dtype: dtype of weight, bias and result.
        table: [tokens, in], rows that the kernels also take by their number; their results are float32. None for none.

    Attributes:
        native: the compiled product; None on torch operators.
    """

    __slots__ = ("_product", "native")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype, table: Tensor | None = None
    ) -> None:
        weight, bias = weight.to(device, dtype), None if bias is None else bias.to(device, dtype)
        self._product: Callable[[Tensor], Tensor]
        self.native: NativeProduct | None = None
        try:
            if device.type != "cpu":
                raise KernelsUnavailable("the kernels run on CPUs")
            result = dtype if table is None else torch.float32
            self._product = self.native = NativeProduct(weight, bias, result, table)
        except KernelsUnavailable:
            multiply = product(weight, bias)
            # A single row is doubled, see ``runners/linear.py``.
            self._product = lambda x: multiply(x) if len(x) > 1 else multiply(x.expand(2, -1).contiguous())[:1]

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)
