"""``foretoken train hybrid``: Qwen3.5's mixture of experts, trained from scratch on full windows without a cache.

Parameters have the names of transformers' modules. Nothing waits for the device, so that a step can be recorded.
Gated DeltaNet (2412.06464) is trained by its delta rule over chunks (section 3.3).
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.core.files import write_json
from foretoken.models.heads.layers import GatedAttention, GatedMlp, OffsetNorm, copy_if_fits, weights_of
from foretoken.train.config import TrainConfig
from foretoken.train.shapes import HybridShape
from foretoken.train.target import Recipe, next_token_loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


CHUNK = 64  # rows of a chunk, a power of two


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = weight.shape[-1]
        return _convolved(F.pad(x, (0, 0, taps - 1, 0)), weight.unbind(-1), x.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,), length, taps = gradients, x.shape[1], weight.shape[-1]
        x_gradient = _convolved(F.pad(gradient, (0, 0, 0, taps - 1)), weight.flip(-1).unbind(-1), length)
        padded = F.pad(x, (0, 0, taps - 1, 0))
        weight_gradient = [(padded[:, tap : tap + length] * gradient).sum((0, 1)) for tap in range(taps)]
        return x_gradient.to(x.dtype), torch.stack(weight_gradient, dim=-1)


def _convolved(padded: Tensor, taps: tuple[Tensor, ...], length: int) -> Tensor:
    out = padded[:, :length] * taps[0]
    for tap in range(1, len(taps)):
        out = torch.addcmul(out, padded[:, tap : tap + length].to(out.dtype), taps[tap])
    return out


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Returns rows [B, T, C], each the sum of x's rows up to it times their taps [C, 1, taps], the own row's last."""
    out: Tensor = _ShortConvolution.apply(x, weight[:, 0])
    return out


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [..., C, C], where C is a power of two.

    The inverses of the diagonal blocks of a size give those of twice the size: [[P, 0], [L, Q]]^-1 is
    [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]. Few large multiplications instead of a substitution row by row.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        size, block = a.shape[-1], 1
        index = torch.arange(size, device=a.device)
        apart = index[:, None] ^ index
        inverse = torch.eye(size, device=a.device, dtype=a.dtype).expand_as(a)
        while block < size:
            below = a * (apart // block == 1)  # the blocks L: rows and columns are of two blocks that make one
            inverse = inverse - inverse @ below @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.mT
        return -(turned @ gradients[0] @ turned).tril(-1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Returns (I + A)^-1 of strictly lower triangular A [..., C, C], where C is a power of two."""
    out: Tensor = _UnitLowerInverse.apply(a)
    return out


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Returns the outputs [B, T, heads, Dv], float32, of S <- exp(g) S; S <- S + beta k (v - k^T S); q^T S / sqrt(Dk).

    Args:
        q: Queries [B, T, heads, Dk]. They and the keys are normalized here.
        k: Keys [B, T, heads, Dk].
        v: Values [B, T, heads, Dv].
        g: Logarithms of decays [B, T, heads], not positive.
        beta: Fractions of a row that the state takes [B, T, heads].
    """
    length = v.shape[1]
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    pad = -length % chunk

    def chunked(x: Tensor) -> Tensor:
        x = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, pad)).transpose(1, 2)
        return x.unflatten(2, (-1, chunk)).contiguous()  # [B, heads, chunks, chunk, ...]

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))
    with torch.autocast(q.device.type, enabled=False):
        return _of_chunks(_unit(q) / math.sqrt(q.shape[-1]), _unit(k), v, g, beta[..., None])[:, :length]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _of_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    total = g.cumsum(-1)  # of the chunk up to each row
    causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -math.inf).exp()
    inner = (q @ k.mT) * decay
    grown = total[..., None].exp()
    # A row's value, less the value for its key in its chunk's earlier rows and in the state before the chunk.
    solved = unit_lower_inverse(((beta * k) @ k.mT * decay).tril(-1)) * beta.mT
    fresh, held = solved @ v, solved @ (k * grown)
    kept = (k * (total[..., -1:] - total).exp()[..., None]).mT  # each row's weight in the state after the chunk
    last = grown[..., -1:, :]
    step = last * torch.eye(k.shape[-1], device=k.device) - kept @ held
    written = kept @ fresh
    states = [torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1], device=q.device)]
    for kept_of_state, added in zip(step.unbind(2), written.unbind(2), strict=True):
        states.append(kept_of_state @ states[-1] + added)
    before = torch.stack(states[:-1], dim=2)
    out = (q * grown) @ before + inner @ (fresh - held @ before)
    return out.flatten(2, 3).transpose(1, 2)


BALANCE = 0.03
"""Weight of the loss that keeps all experts in use."""


class _GatedNorm(nn.Module):
    """RMS norm of heads, times silu of a gate."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps) * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (2412.06464) behind a short convolution."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        hidden, taps = shape.hidden_size, shape.linear_conv_kernel_dim
        self.key_heads, self.heads = shape.linear_num_key_heads, shape.linear_num_value_heads
        self.key_dim, self.value_dim = shape.linear_key_head_dim, shape.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self._parts = [keys, keys, values]
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, taps, groups=2 * keys + values, bias=False)
        steps = torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.norm = _GatedNorm(self.value_dim, shape.rms_norm_eps)
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


class _Router(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size).normal_(std=0.02))


class _Experts(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        experts, hidden, units = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * units, hidden).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, units).normal_(std=0.02))


class SparseMlp(nn.Module):
    """A mixture of experts beside an expert that every row is routed to.

    Every row is multiplied with all experts, and those that it is not routed to have weight 0. For small experts this
    is faster than sorting rows by expert, and no size depends on the data.
    """

    def __init__(self, shape: Any) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self._chosen = shape.num_experts_per_tok
        self.gate, self.experts = _Router(shape), _Experts(shape)
        self.shared_expert = GatedMlp(hidden, shape.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs, and the loss that keeps all experts in use, 1 if they are used equally (2101.03961, eq. 4).

        As in Switch Transformer, but of the routed experts, and by layer: transformers adds the layers up.
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


class HybridLayer(nn.Module):
    """A layer of gated DeltaNet or of gated attention, with a mixture of experts or a gated MLP."""

    def __init__(
        self,
        shape: Any,  # the model's configuration
        kind: str = "full_attention",  # "linear_attention" for DeltaNet, or "full_attention"
        dropout: float = 0.0,  # fraction of the outputs of mixer and MLP that is dropped in training
        intermediate: int | None = None,  # units of a gated MLP, None for a mixture of experts
        heads: int | None = None,  # attention heads, None for the model's number
        kv_heads: int | None = None,  # key-value heads, None for the model's number
    ) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self._dropout, self._recurrent = dropout, kind == "linear_attention"
        if self._recurrent:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = GatedAttention(shape, heads, kv_heads)
        self.mlp = SparseMlp(shape) if intermediate is None else GatedMlp(width, intermediate)
        self.input_layernorm, self.post_attention_layernorm = OffsetNorm(width, eps), OffsetNorm(width, eps)

    def forward(
        self, x: Tensor, depth: int = 0, keys: list[Tensor] | None = None, values: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream, and the loss that keeps all experts in use, 0 without experts.

        See ``UnrolledAttention.forward`` for the others.
        """
        normed = _narrowed(self.input_layernorm(x))
        if self._recurrent:
            mixed = self.linear_attn(normed)
        else:
            mixed = self.self_attn(normed, depth, [] if keys is None else keys, [] if values is None else values)
        x = x + F.dropout(mixed, self._dropout, self.training)
        added = self.mlp(_narrowed(self.post_attention_layernorm(x)))
        added, balance = added if isinstance(added, tuple) else (added, added.new_zeros(()))
        return x + F.dropout(added, self._dropout, self.training), balance

    def start_from(self, layer: nn.Module | None) -> None:
        """Copies the weights of a layer of another model that have the same form."""
        source = weights_of(layer)
        self.self_attn.start_from(source)
        if isinstance(self.mlp, GatedMlp):
            self.mlp.start_from(source)
        for norm, name in ((self.input_layernorm, "input"), (self.post_attention_layernorm, "post_attention")):
            given = source.get(f"{name}_layernorm.weight")
            copy_if_fits(norm.weight, None if given is None else given - 1)


def _narrowed(x: Tensor) -> Tensor:
    """Returns x in autocast's dtype, so that it is converted once for all matrices that multiply it."""
    kind = x.device.type
    narrowed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if narrowed else x


class MtpBlock(nn.Module):
    """A layer that predicts token i + 2 from the state at row i and the embedding of token i + 1 (2412.19437)."""

    def __init__(self, shape: Any, **layer: Any) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = OffsetNorm(width, eps), OffsetNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([HybridLayer(shape, **layer)])
        self.norm = OffsetNorm(width, eps)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        depth: int = 0,
        keys: list[Tensor] | None = None,
        values: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the normed output [B, T, H] for embeddings and states [B, T, H], and the loss of the experts."""
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x, balance = self.layers[0](self.fc(both), depth, keys, values)
        return self.norm(x), balance


class _Decoder(nn.Module):
    def __init__(self, shape: Any, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(shape, kind, dropout) for kind in shape.layer_types)
        self.norm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balances = self.embedded(ids), []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()

    def embedded(self, ids: Tensor) -> Tensor:
        """Returns embeddings [B, T, H]. The gradient of this selection, unlike an embedding's, waits for no device."""
        return self.embed_tokens.weight.index_select(0, ids.flatten()).unflatten(0, ids.shape)


class HybridModel(nn.Module):
    """A hybrid mixture of experts with tied embeddings and an MTP layer.

    Its state is the checkpoint of Qwen3_5MoeForCausalLM. The MTP layer learns beside the model, which it does not
    change.

    Args:
        config: Its config.json.
        dropout: Fraction of the outputs of mixers and MLPs that is dropped in training.
    """

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        shape = SimpleNamespace(**config)
        self.model, self.mtp = _Decoder(shape, dropout), MtpBlock(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [B, T, V] of ids [B, T], and how unevenly their rows used the experts, 1 for evenly."""
        hidden, balance = self.model(ids)
        return F.linear(hidden, self.model.embed_tokens.weight), balance

    def loss(self, ids: Tensor) -> Tensor:
        """Returns the loss of ids [B, T] in nats a token; in training with those of the MTP layer and the experts."""
        hidden, balance = self.model(ids)
        loss = next_token_loss(F.linear(hidden, self.model.embed_tokens.weight), ids)
        if not self.training:
            return loss
        hidden, unevenly = self.mtp(self.model.embedded(ids[:, 1:]).detach(), hidden[:, :-1].detach())
        further = next_token_loss(F.linear(hidden, self.model.embed_tokens.weight.detach()), ids[:, 1:])
        return loss + further + BALANCE * (balance + unevenly)


def _new(shape: HybridShape, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> HybridModel:
    torch.manual_seed(config.seed)
    return HybridModel(shape.config(len(tokenizer), tokenizer.eos_token_id), config.dropout)


def _save(model: HybridModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    state = {name: t.detach().cpu().bfloat16().contiguous() for name, t in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model.config)
    tokenizer.save_pretrained(folder)


HYBRID = Recipe("hybrid", "hybrid-target", HybridShape(), _new, HybridModel.loss, _save, recordable=True)
