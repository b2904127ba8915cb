"""Layers of heads and models in training: norms, rotary positions (2104.09864), MLP, and unrolled attention."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.checks import check_groups


class RmsNorm(nn.RMSNorm):
    """RMS norm that computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class OffsetNorm(nn.Module):
    """RMS norm that computes in float32 and stores its weight less 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps)


def rotations(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [n, width] of positions [n]."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Returns x [..., D] with its first dimensions rotated, as many as there are cosines."""
    width = turn[0].shape[-1]
    low, high = x[..., :width].chunk(2, dim=-1)
    turned = (x[..., :width] * turn[0] + torch.cat((-high, low), dim=-1) * turn[1]).to(x.dtype)
    return torch.cat((turned, x[..., width:]), dim=-1) if width < x.shape[-1] else turned


class GatedMlp(nn.Module):
    """A gated MLP without biases."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def start_from(self, source: Mapping[str, Tensor]) -> None:
        """Copies the strongest units of a layer's MLP, if it has the same form."""
        gate, up, down = (source.get(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        units = self.gate_proj.out_features
        if gate is None or up is None or down is None or len(gate) < units:
            return
        strongest = (gate.norm(dim=1) * down.norm(dim=0)).topk(units).indices
        self.gate_proj.weight.copy_(gate[strongest])
        self.up_proj.weight.copy_(up[strongest])
        self.down_proj.weight.copy_(down[:, strongest])


class HeadAttention(nn.Module):
    """Projections of the attention of a head."""

    def __init__(
        self,
        inputs: int,  # width of the input
        shape: Any,  # the target's configuration, whose numbers of heads are the defaults
        heads: int | None,
        kv_heads: int | None,
        queries: int = 1,  # 2 if the query projection has a gate after each query, else 1
        norm: Callable[[int, float], nn.Module] | None = None,  # norm of queries and keys
    ) -> None:
        super().__init__()
        self.heads = heads or shape.num_attention_heads
        self.kv_heads = kv_heads or shape.num_key_value_heads
        self.head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // self.heads
        check_groups(self.heads, self.kv_heads)
        self.q_proj = nn.Linear(inputs, queries * self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.Identity() if norm is None else norm(self.head_dim, shape.rms_norm_eps) for _ in range(2)
        )
        self.theta = float(shape.rope_parameters["rope_theta"])


class UnrolledAttention(HeadAttention):
    """Attention over the target's features, and over the layer's own outputs at the depths before.

    turned: Dimensions of a head that are rotated, the first ones.
    """

    def __init__(self, inputs: int, shape: Any, heads: int | None, kv_heads: int | None, **options: Any) -> None:
        super().__init__(inputs, shape, heads, kv_heads, **options)
        self.turned = self.head_dim

    def forward(
        self, x: Tensor, depth: int, keys: list[Tensor], values: list[Tensor], roots: Tensor | None = None
    ) -> Tensor:
        """Attends to the target's features up to the root of each row, then to the row's chain at each depth.

        Args:
            x: [B, rows, inputs]. Index n is the row of root ``roots[n]`` at ``depth``, at position root + depth.
            depth: Depth of the rows.
            keys: Keys of the earlier depths. This depth's are appended.
            values: Values of the earlier depths. This depth's are appended.
            roots: Roots of the rows [rows], below the first depth the first ones of the depth before. None for all
                rows of depth 0 in their order.
        """
        batch, rows = x.shape[:2]
        roots = torch.arange(rows, device=x.device) if roots is None else roots
        turn = rotations(roots + depth, self.turned, self.theta)
        queries = self.q_proj(x).view(batch, rows, self.heads, -1)
        q = self.q_norm(queries[..., : self.head_dim]).to(queries.dtype)
        k = self.k_norm(self.k_proj(x).view(batch, rows, self.kv_heads, -1)).to(queries.dtype)
        q, k = (rotated(y.transpose(1, 2), turn) for y in (q, k))
        v = self.v_proj(x).view(batch, rows, self.kv_heads, -1).transpose(1, 2)
        group = self.heads // self.kv_heads
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        if depth == 0:
            mixed = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            mixed = _mixed(q, keys, values, roots)
        mixed = mixed.transpose(1, 2)
        if queries.shape[-1] > self.head_dim:
            mixed = mixed * queries[..., self.head_dim :].sigmoid()
        out: Tensor = self.o_proj(mixed.reshape(batch, rows, -1))
        return out


def _mixed(q: Tensor, keys: list[Tensor], values: list[Tensor], roots: Tensor) -> Tensor:
    """Attention over depth 0 up to the roots, and over the same index of the later depths.

    Shapes: [B, heads, rows, D]; earlier depths may have more rows.
    """
    rows = q.shape[2]
    q = q * q.shape[-1] ** -0.5
    hidden = torch.arange(keys[0].shape[2], device=q.device) > roots[:, None]
    prefix = (q @ keys[0].transpose(-1, -2)).masked_fill(hidden, float("-inf"))
    chain = torch.stack([(q * k[:, :, :rows]).sum(-1) for k in keys[1:]], dim=-1)
    weights = torch.cat((prefix, chain), dim=-1).softmax(-1, dtype=torch.float32).to(values[0].dtype)
    mixed = weights[..., : prefix.shape[-1]] @ values[0]
    for i, v in enumerate(values[1:]):
        mixed = mixed + weights[..., prefix.shape[-1] + i, None] * v[:, :, :rows]
    return mixed


def rotated_fraction(shape: Any) -> float:
    """Returns the fraction of a head that a model of this configuration rotates."""
    return float(shape.rope_parameters.get("partial_rotary_factor", 1.0))


def weights_of(layer: nn.Module | None) -> dict[str, Tensor]:
    return {} if layer is None else dict(layer.named_parameters())


def copy_if_fits(weight: Tensor, given: Tensor | None) -> None:
    if given is not None and given.shape == weight.shape:
        weight.copy_(given)


class GatedAttention(UnrolledAttention):
    """Qwen3.5's attention: norms of queries and keys, a partly rotated head, and gates of the heads' outputs."""

    def __init__(self, shape: Any, heads: int | None = None, kv_heads: int | None = None) -> None:
        super().__init__(shape.hidden_size, shape, heads, kv_heads, queries=2, norm=OffsetNorm)
        self.turned = int(rotated_fraction(shape) * self.head_dim)

    def start_from(self, source: Mapping[str, Tensor]) -> None:
        """Copies the target's attention, if it has the same form. Gates start half open."""
        queries = self.q_proj.weight.view(self.heads, 2, self.head_dim, -1)
        given = source.get("self_attn.q_proj.weight")
        if given is not None and 2 * given.shape[0] == self.q_proj.weight.shape[0]:
            queries[:, 0] = given.view(self.heads, self.head_dim, -1)
            queries[:, 1] *= 0.1
        for name in ("k_proj", "v_proj", "o_proj"):
            copy_if_fits(getattr(self, name).weight, source.get(f"self_attn.{name}.weight"))


class HeadLayer(nn.Module):
    """A decoder layer of a head, for a target of the configuration ``shape``."""

    def __init__(self, attention: HeadAttention, shape: Any, intermediate: int) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.self_attn = attention
        self.mlp = GatedMlp(width, intermediate)

    @property
    def stream_norm(self) -> RmsNorm:
        return self.input_layernorm

    def attention_input(self, embedded: Tensor | None, hidden: Tensor) -> Tensor:
        return self.stream_norm(hidden)

    def forward(self, embedded: Tensor | None, hidden: Tensor, *attended: Any) -> Tensor:
        """Returns the residual stream [..., H] from that, and from embeddings [..., H] if the attention reads them.

        attended: further arguments of the attention.
        """
        hidden = hidden + self.self_attn(self.attention_input(embedded, hidden), *attended)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def start_from(self, layer: nn.Module | None) -> None:
        """Copies from a layer of the target: attention on the residual stream, the MLP's strongest units, norms."""
        source = weights_of(layer)
        width = self.stream_norm.normalized_shape[0]
        for name, weight in self.self_attn.named_parameters():
            on_stream = weight[:, -width:] if name in ("q_proj.weight", "k_proj.weight", "v_proj.weight") else weight
            copy_if_fits(on_stream, source.get(f"self_attn.{name}"))
        self.mlp.start_from(source)
        for norm, name in ((self.stream_norm, "input"), (self.post_attention_layernorm, "post_attention")):
            copy_if_fits(norm.weight, source.get(f"{name}_layernorm.weight"))


class FusedLayer(HeadLayer):
    """Attention over concat[norm(embedding), norm(hidden)] and an MLP. The residual is the hidden state."""

    def __init__(self, shape: Any, intermediate: int, heads: int | None = None, kv_heads: int | None = None) -> None:
        super().__init__(UnrolledAttention(2 * shape.hidden_size, shape, heads, kv_heads), shape, intermediate)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    @property
    def stream_norm(self) -> RmsNorm:
        return self.hidden_norm

    def attention_input(self, embedded: Tensor | None, hidden: Tensor) -> Tensor:
        assert embedded is not None
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)


class FusedTaps(nn.Module):
    """EAGLE-3's fusion of tapped states, and its vocabulary head."""

    fc: nn.Linear
    fc_norm: nn.ModuleList  # norms of the states of each tap before ``fc`` fuses them (EAGLE 3.1); empty for none
    norm: RmsNorm
    lm_head: nn.Linear
    normed: bool  # whether outputs are chained after the norm, else before it

    def outputs(self, layer: nn.Module, embedded: Tensor, states: Tensor, depths: int) -> Iterator[Tensor]:
        """Yields a layer's outputs by depth as ``unroll`` does, from the concatenated states of all taps."""
        if self.fc_norm:
            parts = zip(self.fc_norm, states.chunk(len(self.fc_norm), dim=-1), strict=True)
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)

        def output(*inputs: Any) -> Tensor:
            hidden: Tensor = layer(*inputs)
            return self.norm(hidden) if self.normed else hidden

        return unroll(output, embedded, self.fc(states), depths)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.normed else self.norm(hidden))
        return logits


def unroll(layer: Callable[..., Tensor], embedded: Tensor, hidden: Tensor, depths: int) -> Iterator[Tensor]:
    """Yields a layer's outputs by depth [B, roots, H], each computed from those of the depth before, as in use.

    Args:
        layer: Computes outputs from embeddings, hidden states, depth, and keys and values of earlier depths.
        embedded: Embeddings of the tokens, [B, T, H].
        hidden: Hidden states at depth 0, [B, roots, H]. Row i takes the embedding of token i + 1.
        depths: Number of depths.
    """
    roots = hidden.shape[1]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for depth in range(depths):
        hidden = layer(embedded[:, 1 + depth : 1 + depth + roots], hidden, depth, keys, values)
        yield hidden
