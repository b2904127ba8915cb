"""What one decoder layer computes, as data: its token mixer, its MLP, and the norms around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretoken.models.families.experts import Experts

Mixer = Literal["attention", "delta", "convolution", "mamba"]
Mlp = Literal["gated", "ungated", "experts"]


@dataclass(frozen=True, slots=True)
class NormPlaces:
    """Where a layer has norms: before and after its mixer, before and after its MLP."""

    mixer: bool = True
    after_mixer: bool = False
    mlp: bool = True
    after_mlp: bool = False


PRE = NormPlaces()
POST = NormPlaces(mixer=False, after_mixer=True, mlp=False, after_mlp=True)
SANDWICH = NormPlaces(after_mixer=True, after_mlp=True)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    x += after_mixer(mixer(norm(x))); x += after_mlp(mlp(mlp_norm(x))). In a parallel layer both read the same x. A
    gated MLP is down(activation(gate) * up), an ungated one down(activation(up)).

    Attributes:
        mixer: kind of the token mixer.
        mlp: kind of the MLP.
        norms: which of the four norms there are.
        parallel: whether the MLP reads what the mixer reads, instead of the mixer's result.
        window: length of the attention window, the row itself included; 0 for no window.
        rope: index in ``Architecture.frequencies``; -1 for no rotation.
        experts: the MLP if its kind is "experts".
    """

    mixer: Mixer = "attention"
    mlp: Mlp = "gated"
    norms: NormPlaces = PRE
    parallel: bool = False
    window: int = 0
    rope: int = 0
    experts: Experts | None = None
