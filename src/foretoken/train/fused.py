"""Heads on three fused hidden states with a vocabulary of their own: what EAGLE-3 and P-EAGLE have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.train.lessons import Head, RmsNorm, Teacher
from foretoken.train.unrolled import GatedMlp, UnrolledAttention, copy_if_fits, weights_of


@dataclass(frozen=True)
class FusedConfig:
    """Size of the head.

    Args:
        taps: Indices of the three fused ``hidden_states``, None for the usual ones.
        intermediate: Units of the MLPs.
        heads: Attention heads, None for as many as the target has.
        kv_heads: Key-value heads, None for as many as the target has.
        vocabulary: Number of the target's tokens that the head can propose.
    """

    taps: tuple[int, ...] | None = None
    intermediate: int = 448
    heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int = 3072

    def __post_init__(self) -> None:
        for name in ("intermediate", "vocabulary"):
            integer(name, getattr(self, name), 1)
        if self.taps is not None and len(self.taps) != 3:
            raise InvalidRequest(f"{len(self.taps)} taps; EAGLE-3 fuses three hidden states, low, middle and high")

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are fused. The usual ones are [2, n // 2, n - 3]."""
        taps = self.taps or (min(2, layers - 1), layers // 2, max(layers - 3, 1))
        if not all(0 < tap < layers for tap in taps):
            raise InvalidRequest(f"taps {list(taps)} for a target of {layers} layers; expected 1 to {layers - 1}")
        return taps

    def tokens(self, teacher: Teacher, counts: Tensor) -> Tensor:
        """Returns the ids of the most frequent tokens by ``counts`` [V], ascending."""
        return counts.topk(min(self.vocabulary, teacher.vocab)).indices.sort().values


class UnrolledLayer(nn.Module):
    """A layer of Llama.

    Args:
        config: The head's.
        shape: The target's configuration.
        inputs: Width of what the attention reads, None for that of the residual stream.
    """

    def __init__(self, config: FusedConfig, shape: Any, inputs: int | None = None) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.self_attn = UnrolledAttention(inputs or width, shape, config.heads, config.kv_heads)
        self.mlp = GatedMlp(width, config.intermediate)

    @property
    def stream_norm(self) -> RmsNorm:
        """The norm of the residual stream before the attention."""
        return self.input_layernorm

    def read(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Returns what the attention reads."""
        return self.stream_norm(hidden)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        depth: int,
        keys: list[Tensor],
        values: list[Tensor],
        roots: Tensor | None = None,
    ) -> Tensor:
        """Returns the residual stream [B, rows, H], from embeddings and residual stream [B, rows, H].

        See ``UnrolledAttention.forward`` for the others.
        """
        hidden = hidden + self.self_attn(self.read(embedded, hidden), depth, keys, values, roots)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def start_from(self, layer: nn.Module | None) -> None:
        """Copies what fits from a layer of the target: attention on the residual stream, the MLP's strongest units."""
        source = weights_of(layer)
        width = self.stream_norm.normalized_shape[0]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(self.self_attn, name).weight
            copy_if_fits(weight if name == "o_proj" else weight[:, -width:], source.get(f"self_attn.{name}.weight"))
        self.mlp.start_from(source)
        for own, name in ((self.stream_norm, "input"), (self.post_attention_layernorm, "post_attention")):
            copy_if_fits(own.weight, source.get(f"{name}_layernorm.weight"))


class FusedLayer(UnrolledLayer):
    """Attention over concat[norm(embedding), norm(hidden)] and an MLP. The residual is the hidden state."""

    def __init__(self, config: FusedConfig, shape: Any) -> None:
        super().__init__(config, shape, 2 * shape.hidden_size)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    @property
    def stream_norm(self) -> RmsNorm:
        return self.hidden_norm

    def read(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)


class FusedHead(Head):
    """A head of layers on fused hidden states. Row i takes the embedding of token i + 1 and the target's feature there.

    Attributes:
        stack: The layers; the checkpoint has them under the names that a subclass gives them.
    """

    drawn = True
    vocabulary: Tensor
    stack: Sequence[UnrolledLayer]

    def __init__(self, config: FusedConfig, depths: int, teacher: Teacher, vocabulary: Tensor) -> None:
        super().__init__()
        self.depths, self.taps, self.intermediate = depths, config.tapped(teacher.layers), config.intermediate
        width = teacher.hidden
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.norm = RmsNorm(width, teacher.config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(vocabulary), bias=False)
        self.vocabulary = vocabulary

    @torch.no_grad()
    def _start_from(self, teacher: Teacher) -> None:
        """Initializes with the highest tap, the target's last layers where shapes fit, and its vocabulary rows.

        Such a head predicts token i + 1, which it is given, so the last norm starts small and the output uncertain.
        """
        width = self.fc.out_features
        self.fc.weight.normal_(std=0.005)
        self.fc.weight[:, -width:] += torch.eye(width)
        self.lm_head.weight.copy_(teacher.head[self.vocabulary.to(teacher.head.device)])
        for back, layer in enumerate(reversed(self.stack)):
            layer.start_from(teacher.layer(-1 - back))
        if (norm := teacher.final_norm()) is not None and norm.shape == self.norm.weight.shape:
            self.norm.weight.copy_(0.1 * norm)

    def describe(self, teacher: Teacher) -> dict[str, Any]:
        shape, attention = teacher.config, self.stack[0].self_attn
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": teacher.hidden,
            "target_hidden_size": teacher.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.stack),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_parameters["rope_theta"],
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_parameters["rope_theta"]},
            "max_position_embeddings": shape.max_position_embeddings,
            "vocab_size": teacher.vocab,
            "draft_vocab_size": len(self.vocabulary),
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "foretoken_taps": list(self.taps),  # unambiguously the inputs of these layers, see models/heads/taps
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps), "use_aux_hidden_state": True},
        }

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads an earlier head. Tokens that are not in its vocabulary keep their present rows."""
        offsets = tensors.get("d2t", torch.zeros(len(tensors["lm_head.weight"]), dtype=torch.int64))
        known = {int(i + offset): i for i, offset in enumerate(offsets)}
        rows = self.lm_head.weight.detach().clone()
        for own, token in enumerate(self.vocabulary.tolist()):
            if token in known:
                rows[own] = tensors["lm_head.weight"][known[token]]
        others = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
        super().start({**others, "lm_head.weight": rows})

    def tensors(self, teacher: Teacher) -> dict[str, Tensor]:
        """Returns the checkpoint with both maps of the vocabulary: target id = i + d2t[i], t2d marks the known ids.

        A head that knows all ids has no maps, which other engines refuse then.
        """
        ids = self.vocabulary.cpu()
        if len(ids) == teacher.vocab:
            return self.weights()
        known = torch.zeros(teacher.vocab, dtype=torch.bool)
        known[ids] = True
        return self.weights() | {"d2t": ids - torch.arange(len(ids)), "t2d": known}
