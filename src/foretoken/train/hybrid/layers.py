"""Layers of Qwen3.5's mixtures of experts for training: all rows of full windows, no cache.

Parameters have the names of transformers' modules. Nothing waits for the device, so that a step can be recorded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.train.hybrid.convolution import short_convolution
from foretoken.train.hybrid.delta import gated_delta_rule
from foretoken.train.rotary import partly_rotated, rotations
from foretoken.train.unrolled import GatedMlp


class OffsetNorm(nn.Module):
    """RMS norm that computes in float32 and stores its weight less 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps)


class _GatedNorm(nn.Module):
    """RMS norm of heads, times silu of a gate."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps) * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (2412.06464) behind a short convolution."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, taps = config["hidden_size"], config["linear_conv_kernel_dim"]
        self.key_heads, self.heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.key_dim, self.value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self._parts = [keys, keys, values]
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, taps, groups=2 * keys + values, bias=False)
        steps = torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.norm = _GatedNorm(self.value_dim, config["rms_norm_eps"])
        self.out_proj = nn.Linear(values, hidden, bias=False)
        self.in_proj_qkv = nn.Linear(hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.silu(short_convolution(self.in_proj_qkv(x), self.conv1d.weight)).split(self._parts, dim=-1)
        group = self.heads // self.key_heads
        q, k = (y.unflatten(-1, (self.key_heads, -1)).repeat_interleave(group, 2) for y in (q, k))
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        mixed = gated_delta_rule(q, k, v.unflatten(-1, (self.heads, -1)), g, self.in_proj_b(x).sigmoid())
        gated = self.norm(mixed, self.in_proj_z(x).unflatten(-1, (self.heads, -1)))
        out: Tensor = self.out_proj(gated.flatten(2))
        return out


class GatedAttention(nn.Module):
    """Attention with norms of queries and keys, a rotated share of each head, and gates of the heads' outputs."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        rope = config["rope_parameters"]
        self._theta, self._turned = rope["rope_theta"], int(self.head_dim * rope["partial_rotary_factor"])
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = OffsetNorm(self.head_dim, config["rms_norm_eps"])
        self.k_norm = OffsetNorm(self.head_dim, config["rms_norm_eps"])

    def forward(self, x: Tensor) -> Tensor:
        queries, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        turn = rotations(torch.arange(x.shape[1], device=x.device), self._turned, self._theta)
        q = partly_rotated(self.q_norm(queries).transpose(1, 2), turn)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        k = partly_rotated(k.transpose(1, 2), turn)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.to(v.dtype).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k, v, is_causal=True)
        out: Tensor = self.o_proj((mixed.transpose(1, 2) * gate.sigmoid()).flatten(2))
        return out


class _Router(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["num_experts"], config["hidden_size"]).normal_(std=0.02))


class _Experts(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        experts, hidden, units = (config[n] for n in ("num_experts", "hidden_size", "moe_intermediate_size"))
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * units, hidden).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, units).normal_(std=0.02))


class SparseMlp(nn.Module):
    """A mixture of experts beside an expert that every row takes.

    Every row is multiplied with all experts, and those that it is not routed to count nothing. Small experts cost less
    so than rows sorted by expert, and no size depends on the data.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self._chosen = config["num_experts_per_tok"]
        self.gate, self.experts = _Router(config), _Experts(config)
        self.shared_expert = GatedMlp(hidden, config["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs, and the loss that keeps all experts in use, 1 where they are used alike (2101.03961, eq. 4).

        As in Switch Transformer, but of the experts that a row takes, and by layer: transformers adds the layers up.
        """
        weights, balance = self._routed(x)
        gate, up = self.experts.gate_up_proj.unflatten(1, (2, -1)).unbind(1)
        active = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
        active = active.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None].to(active.dtype)
        mixed = F.linear(active.flatten(-2), self.experts.down_proj.permute(1, 0, 2).flatten(1))
        return mixed + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x), balance

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weight of each expert for each row [B, T, experts], 0 of those it is not routed to; the loss."""
        with torch.autocast(x.device.type, enabled=False):
            shares = F.linear(x.float(), self.gate.weight).softmax(-1)
        top, index = shares.topk(self._chosen, dim=-1)
        used = torch.zeros_like(shares).scatter(-1, index, 1.0)
        balance = (used.mean((0, 1)) * shares.mean((0, 1))).sum() * shares.shape[-1] / self._chosen
        return shares * used / top.sum(-1, keepdim=True), balance
