"""EAGLE-3 heads (2503.01840): one decoder layer on fused hidden states, trained by unrolling its own outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import InvalidRequest
from foretoken.train.lessons import Head, Lesson, RmsNorm, Teacher
from foretoken.train.unrolled import GatedMlp, UnrolledAttention, copy_if_fits, weights_of


@dataclass(frozen=True)
class Eagle3Config:
    """Size and training of the head.

    Args:
        taps: Indices of the three fused ``hidden_states``, None for the usual ones.
        intermediate: Units of the MLP.
        heads: Attention heads, None for as many as the target has.
        kv_heads: Key-value heads, None for as many as the target has.
        vocabulary: Number of the target's tokens that the head can propose.
        depths: Unrolled steps in training.
        single_share: First share of the run, in which only one step is unrolled. It costs a third.
    """

    taps: tuple[int, ...] | None = None
    intermediate: int = 448
    heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int = 3072
    depths: int = 4
    single_share: float = 0.6

    def __post_init__(self) -> None:
        for name in ("intermediate", "vocabulary", "depths"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.single_share <= 1:
            raise InvalidRequest(f"single_share is {self.single_share}; expected a share, 0 to 1")
        if self.taps is not None and len(self.taps) != 3:
            raise InvalidRequest(f"{len(self.taps)} taps; EAGLE-3 fuses three hidden states, low, middle and high")

    def tapped(self, layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs are fused. The usual ones are [2, n // 2, n - 3]."""
        taps = self.taps or (min(2, layers - 1), layers // 2, max(layers - 3, 1))
        if not all(0 < tap < layers for tap in taps):
            raise InvalidRequest(f"taps {list(taps)} for a target of {layers} layers; expected 1 to {layers - 1}")
        return taps


class Eagle3Head(Head):
    """An EAGLE-3 head. Its state_dict is the checkpoint, under SafeAILab's names.

    Row i takes the embedding of token i + 1 and the feature at row i, and proposes token i + 2. At depth 0 the
    feature is the target's. At depth j it is the head's own output at row i - 1 of depth j - 1.
    """

    drawn = True
    vocabulary: Tensor

    def __init__(self, config: Eagle3Config, teacher: Teacher, vocabulary: Tensor) -> None:
        super().__init__()
        self.depths, self.taps, self.settings = config.depths, config.tapped(teacher.layers), config
        self._unrolled = config.depths
        width, shape = teacher.hidden, teacher.config
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = _Layer(config, shape)
        self.norm = RmsNorm(width, shape.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(vocabulary), bias=False)
        self.vocabulary = vocabulary
        self._start_from(teacher)

    @classmethod
    def made(cls, config: Eagle3Config, teacher: Teacher, counts: Tensor) -> Eagle3Head:
        """Returns a head that proposes the most frequent tokens by ``counts`` [V]."""
        common = counts.topk(min(config.vocabulary, teacher.vocab)).indices
        return cls(config, teacher, common.sort().values)

    @torch.no_grad()
    def _start_from(self, teacher: Teacher) -> None:
        """Initializes with the highest tap, the target's last layer where shapes fit, and its vocabulary rows.

        Such a head predicts token i + 1, which it is given, so the last norm starts small and the output uncertain.
        """
        width = self.fc.out_features
        self.fc.weight.normal_(std=0.005)
        self.fc.weight[:, -width:] += torch.eye(width)
        self.lm_head.weight.copy_(teacher.head[self.vocabulary.to(teacher.head.device)])
        self.midlayer.start_from(teacher.layer(-1))
        if (norm := teacher.final_norm()) is not None and norm.shape == self.norm.weight.shape:
            self.norm.weight.copy_(0.1 * norm)

    def begin(self, progress: float, step: int, length: int) -> None:
        self._unrolled = 1 if progress < self.settings.single_share else self.depths

    def forward(self, lesson: Lesson) -> list[Tensor]:
        roots = lesson.ids.shape[1] - self.depths
        hidden = self.fc(lesson.tapped(self.taps)[:, :roots])
        embedded = lesson.embedded()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for depth in range(self._unrolled if self.training else self.depths):
            hidden = self.midlayer(embedded[:, 1 + depth : 1 + depth + roots], hidden, depth, keys, values)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    def describe(self, teacher: Teacher) -> dict[str, Any]:
        shape, attention = teacher.config, self.midlayer.self_attn
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": teacher.hidden,
            "target_hidden_size": teacher.hidden,
            "intermediate_size": self.settings.intermediate,
            "num_hidden_layers": 1,
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
        known = {int(i + offset): i for i, offset in enumerate(tensors["d2t"])}
        rows = self.lm_head.weight.detach().clone()
        for own, token in enumerate(self.vocabulary.tolist()):
            if token in known:
                rows[own] = tensors["lm_head.weight"][known[token]]
        others = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
        super().start({**others, "lm_head.weight": rows})

    def tensors(self, teacher: Teacher) -> dict[str, Tensor]:
        """Returns the checkpoint with both maps of the vocabulary: target id = i + d2t[i], t2d marks the known ids."""
        ids = self.vocabulary.cpu()
        known = torch.zeros(teacher.vocab, dtype=torch.bool)
        known[ids] = True
        return self.weights() | {"d2t": ids - torch.arange(len(ids)), "t2d": known}


class _Layer(nn.Module):
    """Attention over concat[norm(embedding), norm(hidden)] and an MLP. The residual is the hidden state."""

    def __init__(self, config: Eagle3Config, shape: Any) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps)
        self.hidden_norm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.self_attn = UnrolledAttention(2 * width, shape, config.heads, config.kv_heads)
        self.mlp = GatedMlp(width, config.intermediate)

    def forward(self, embedded: Tensor, hidden: Tensor, depth: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Returns [B, roots, H] from [B, roots, H] each. Appends this depth's keys and values to the lists."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(both, depth, keys, values)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def start_from(self, layer: nn.Module | None) -> None:
        """Copies what fits from a layer of the target: attention into the hidden half, the MLP's strongest units."""
        source = weights_of(layer)
        width = self.hidden_norm.normalized_shape[0]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(self.self_attn, name).weight
            copy_if_fits(weight if name == "o_proj" else weight[:, width:], source.get(f"self_attn.{name}.weight"))
        self.mlp.start_from(source)
        for own, name in ((self.hidden_norm, "input"), (self.post_attention_layernorm, "post_attention")):
            copy_if_fits(own.weight, source.get(f"{name}_layernorm.weight"))
