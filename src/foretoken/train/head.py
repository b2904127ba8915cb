"""The interface of heads in training: a module, its logits, its file format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.core.errors import InvalidRequest
from foretoken.train.frozen_target import FrozenTarget, TrainBatch

EVALUATED = 4  # heads that draft a block evaluate every fourth row


class Drafted(NamedTuple):
    """Output of a head in training."""

    # for every depth logits [B, R, Vd], of R roots: the logits of root i at depth j are for token i + 2 + j; in
    # training, later depths may be missing
    logits: list[Tensor]
    # logits [B, R] of the estimated acceptance at every depth, None for a head without such estimates
    confidence: list[Tensor] | None = None
    # at every depth the rows [R] of a window whose chains were computed, None for the first T - depths; in evaluation
    # they are the same at all depths, ascending
    roots: list[Tensor] | None = None


class Head(nn.Module, ABC):
    """A head that drafts from the target's hidden states.

    Subclasses are constructed from their settings, the target, and the counts [V] of tokens in its text.

    Attributes:
        depths: Number of consecutive tokens that it drafts.
        taps: Layers whose inputs it reads besides the normed output.
        vocabulary: The target's token id of each of its logits, None if they are the target's own.
        samples: Whether its tokens are sampled, each given those before, instead of ranked independently.
        window: Tokens that its attention sees when it drafts, of the head that training started from; None for all.
    """

    depths: int
    window: int | None = None
    taps: tuple[int, ...] = ()
    vocabulary: Tensor | None = None
    samples = False

    @abstractmethod
    def forward(self, batch: TrainBatch) -> Drafted:
        """Returns the trained outputs."""

    def begin(self, progress: float, step: int, length: int) -> None:
        """Called before each training step, with the finished fraction of the run and the tokens per window."""

    @abstractmethod
    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        """Returns the content of config.json."""

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the checkpoint of an earlier head. Raises RuntimeError or KeyError if it does not fit."""
        self.load_state_dict({name: value.float() for name, value in tensors.items()})

    def tensors(self, target: FrozenTarget) -> dict[str, Tensor]:
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().bfloat16().contiguous() for name, value in self.state_dict().items()}


def shuffled_rows(count: int, step: int) -> Tensor:
    """Returns the rows 0 to ``count`` - 1 in a random order that depends on ``step`` alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(step))


def mask_token_of(given: int | None, target: FrozenTarget, counts: Tensor) -> int:
    """Returns the mask token of a head: ``given``, or the target's rarest token by ``counts`` [V]."""
    token = int((counts == counts.min()).nonzero()[-1]) if given is None else given
    if token >= target.vocab:
        raise InvalidRequest(f"mask_token {token} for a vocabulary of {target.vocab} tokens")
    return token


@torch.no_grad()
def start_near_target(fc: nn.Linear, norm: Tensor, target: FrozenTarget, offset: float = 0.0) -> None:
    """Initializes a head near the target: ``fc`` passes on its last input, the last norm is small.

    Such a head predicts token i + 1, which it is given, so its output starts uncertain. ``offset`` is the value that it
    adds to the norm's stored weight.
    """
    width = fc.out_features
    fc.weight.normal_(std=0.005)
    fc.weight[:, -width:] += torch.eye(width)
    if (weight := target.final_norm()) is not None and weight.shape == norm.shape:
        norm.copy_(0.1 * weight - offset)


def decoder_config(target: FrozenTarget, layers: int, attention: Any, intermediate: int) -> dict[str, Any]:
    """Returns the entries of config.json that all heads of decoder layers have. attention: of the first layer."""
    shape = target.config
    theta = shape.rope_parameters["rope_theta"]
    return {
        "hidden_size": target.hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": target.vocab,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
