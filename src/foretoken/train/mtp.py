"""Multi-token-prediction layers (2412.19437, section 2.2), trained by unrolling one layer as it is chained.

The checkpoint has the layout of Qwen3.5, in a folder of its own: a layer with gated attention and norms of queries and
keys, whatever the target's are, and with experts if the target is a mixture of experts of that family. Other engines
load it only beside a Qwen3.5 target with the same sizes. A target's own layer, if it has one, is where training starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.heads.mtp import HIDDEN_KEY
from foretoken.train.hybrid.layers import OffsetNorm, SparseMlp
from foretoken.train.hybrid.shape import MODEL_TYPE
from foretoken.train.lessons import Head, Lesson, Teacher
from foretoken.train.unrolled import GatedMlp, UnrolledAttention, copy_if_fits, weights_of


@dataclass(frozen=True)
class MtpTrainConfig:
    """Size and training of the layer.

    Args:
        intermediate: Units of the MLP.
        heads: Attention heads, None for as many as the target has.
        kv_heads: Key-value heads, None for as many as the target has.
        depths: Unrolled steps in training.
        single_share: First share of the run, in which only one step is unrolled. It costs a third.
    """

    intermediate: int = 768
    heads: int | None = None
    kv_heads: int | None = None
    depths: int = 4
    single_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("intermediate", "depths"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.single_share <= 1:
            raise InvalidRequest(f"single_share is {self.single_share}; expected a share, 0 to 1")


class MtpHead(Head):
    """An MTP layer. Its state_dict is the checkpoint, under Qwen3.5's names.

    Row i takes the embedding of token i + 1 and the state at row i, and proposes token i + 2. At depth 0 the state is
    the target's after the final norm. At depth j it is the layer's own output, normed, at row i - 1 of depth j - 1.
    """

    drawn = True

    def __init__(self, config: MtpTrainConfig, teacher: Teacher) -> None:
        super().__init__()
        self.depths, self.settings, self._unrolled = config.depths, config, config.depths
        self.mtp = _Mtp(config, teacher.config)
        own = _own(teacher.path)
        if own and {n: t.shape for n, t in own.items()} == {n: t.shape for n, t in self.state_dict().items()}:
            self.start(own)
        else:
            self._start_from(teacher)

    @classmethod
    def made(cls, config: MtpTrainConfig, teacher: Teacher, counts: Tensor) -> MtpHead:
        """Returns the untrained layer."""
        return cls(config, teacher)

    @torch.no_grad()
    def _start_from(self, teacher: Teacher) -> None:
        """Initializes with the target's state, and its last layer where shapes fit.

        Such a layer predicts token i + 1, which it is given, so the last norm starts small and the output uncertain.
        """
        width = teacher.hidden
        self.mtp.fc.weight.normal_(std=0.005)
        self.mtp.fc.weight[:, width:] += torch.eye(width)
        self.mtp.layer.start_from(teacher.layer(-1))
        if (norm := teacher.final_norm()) is not None and norm.shape == self.mtp.norm.weight.shape:
            self.mtp.norm.weight.copy_(0.1 * norm - 1)

    def begin(self, progress: float, step: int, length: int) -> None:
        self._unrolled = 1 if progress < self.settings.single_share else self.depths

    def forward(self, lesson: Lesson) -> list[Tensor]:
        roots = lesson.ids.shape[1] - self.depths
        hidden, embedded = lesson.last()[:, :roots], lesson.embedded()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for depth in range(self._unrolled if self.training else self.depths):
            hidden = self.mtp(embedded[:, 1 + depth : 1 + depth + roots], hidden, depth, keys, values)
            logits.append(lesson.read(hidden))
        return logits

    def describe(self, teacher: Teacher) -> dict[str, Any]:
        shape, attention = teacher.config, self.mtp.layer.self_attn
        theta = shape.rope_parameters["rope_theta"]
        states = {HIDDEN_KEY: {"normed": True, "chained_normed": True}}  # see models/heads/mtp_states
        if shape.model_type == MODEL_TYPE:
            sizes = {"num_attention_heads": attention.heads, "num_key_value_heads": attention.kv_heads}
            return {**load_config(teacher.path), **sizes, **states}
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "hidden_size": teacher.hidden,
            "intermediate_size": self.settings.intermediate,
            "num_hidden_layers": teacher.layers,
            "layer_types": ["full_attention"] * teacher.layers,
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "attn_output_gate": True,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": _turned(shape)},
            "max_position_embeddings": shape.max_position_embeddings,
            "vocab_size": teacher.vocab,
            "tie_word_embeddings": bool(getattr(shape, "tie_word_embeddings", False)),
            **states,
        }


def _own(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a target's own MTP layer in Qwen3.5's layout, none if it has no such layer."""
    weights = open_weights(path)
    return {name: weights[name] for name in weights if name.startswith("mtp.")}


def _turned(shape: Any) -> float:
    """Returns the share of a head that a target rotates."""
    return float(shape.rope_parameters.get("partial_rotary_factor", 1.0))


class _GatedAttention(UnrolledAttention):
    def __init__(self, config: MtpTrainConfig, shape: Any) -> None:
        super().__init__(shape.hidden_size, shape, config.heads, config.kv_heads, queries=2, turned=_turned(shape))
        self.q_norm = OffsetNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = OffsetNorm(self.head_dim, shape.rms_norm_eps)

    def normed_query(self, x: Tensor) -> Tensor:
        out: Tensor = self.q_norm(x)
        return out.to(x.dtype)

    def normed_key(self, x: Tensor) -> Tensor:
        out: Tensor = self.k_norm(x)
        return out.to(x.dtype)

    def start_from(self, source: dict[str, Tensor]) -> None:
        """Copies the target's attention, if it has the same form. Gates start half open."""
        queries = self.q_proj.weight.view(self.heads, 2, self.head_dim, -1)
        given = source.get("self_attn.q_proj.weight")
        if given is not None and 2 * given.shape[0] == self.q_proj.weight.shape[0]:
            queries[:, 0] = given.view(self.heads, self.head_dim, -1)
            queries[:, 1] *= 0.1
        for name in ("k_proj", "v_proj", "o_proj"):
            copy_if_fits(getattr(self, name).weight, source.get(f"self_attn.{name}.weight"))


class _DecoderLayer(nn.Module):
    def __init__(self, config: MtpTrainConfig, shape: Any) -> None:
        super().__init__()
        self.input_layernorm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _GatedAttention(config, shape)
        self.post_attention_layernorm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)
        sparse = shape.model_type == MODEL_TYPE
        self.mlp = SparseMlp(shape.to_dict()) if sparse else GatedMlp(shape.hidden_size, config.intermediate)

    def forward(self, hidden: Tensor, depth: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), depth, keys, values)
        added = self.mlp(self.post_attention_layernorm(hidden))
        out: Tensor = hidden + (added[0] if isinstance(added, tuple) else added)
        return out

    def start_from(self, layer: nn.Module | None) -> None:
        """Copies what fits from a layer of the target."""
        source = weights_of(layer)
        self.self_attn.start_from(source)
        if isinstance(self.mlp, GatedMlp):
            self.mlp.start_from(source)
        for own, name in ((self.input_layernorm, "input"), (self.post_attention_layernorm, "post_attention")):
            given = source.get(f"{name}_layernorm.weight")
            copy_if_fits(own.weight, None if given is None else given - 1)


class _Mtp(nn.Module):
    def __init__(self, config: MtpTrainConfig, shape: Any) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = OffsetNorm(width, eps)
        self.pre_fc_norm_hidden = OffsetNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([_DecoderLayer(config, shape)])
        self.norm = OffsetNorm(width, eps)

    @property
    def layer(self) -> _DecoderLayer:
        """The decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, _DecoderLayer)
        return layer

    def forward(self, embedded: Tensor, hidden: Tensor, depth: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Returns the normed output [B, roots, H] for embeddings and states [B, roots, H]."""
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        out: Tensor = self.norm(self.layer(self.fc(both), depth, keys, values))
        return out
