"""One decoder layer as data: its token mixers, its MLP, and the norms around them."""

from dataclasses import dataclass
from typing import Literal

from foretoken.models.families.experts import Experts

RecurrentMixer = Literal["delta", "convolution", "mamba"]
Mlp = Literal["gated", "ungated", "experts"]


@dataclass(frozen=True, slots=True)
class NormPlaces:
    """Positions of a layer's norms: before and after its mixers, before and after its MLP."""

    mixer: bool = True
    after_mixer: bool = False
    mlp: bool = True
    after_mlp: bool = False

    def of(self, mixer: bool, mlp: bool) -> "NormPlaces":
        """Returns the norms of a layer that may lack its mixers or its MLP."""
        return NormPlaces(self.mixer and mixer, self.after_mixer and mixer, self.mlp and mlp, self.after_mlp and mlp)


UNBOUNDED = (0, False)  # the view of a layer without a window
PRE = NormPlaces()
NO_NORMS = NormPlaces(mixer=False, mlp=False)
POST = NormPlaces(mixer=False, after_mixer=True, mlp=False, after_mlp=True)
SANDWICH = NormPlaces(after_mixer=True, after_mlp=True)


@dataclass(frozen=True, slots=True)
class BranchFactors:
    """Factors of a layer's additions to the residual stream: attention, a recurrent mixer, and the MLP."""

    attention: float = 1.0
    recurrent: float = 1.0
    mlp: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Components of a kind of layer, which ``layer_types`` names."""

    attention: bool = False  # whether attention is a token mixer
    recurrent: RecurrentMixer | None = None  # kind of the recurrent token mixer; None for none
    mlp: bool = True  # whether there is an MLP

    @property
    def mixes(self) -> bool:
        return self.attention or self.recurrent is not None


WITH_ATTENTION = LayerKind(attention=True)


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Heads of keys and values, and the width of every head."""

    kv_heads: int
    head_dim: int

    @property
    def numbers(self) -> int:
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    x += after_mixer(mixer(norm(x))); x += after_mlp(mlp(mlp_norm(x))). In a parallel layer both read the same x. A
    gated MLP is down(activation(gate) * up), an ungated one down(activation(up)). Results of
    several mixers of the same input are added up (Falcon-H1). A layer may have no mixer or no MLP (Nemotron-H).
    """

    attention: bool = True  # whether attention is a token mixer
    recurrent: RecurrentMixer | None = None  # kind of the recurrent token mixer; None for none
    mlp: Mlp | None = "gated"  # kind of the MLP; None for none
    norms: NormPlaces = PRE  # the norms that exist, of four
    parallel: bool = False  # whether the MLP reads the mixer's input instead of its result
    # length of the attention window, the row itself included; 0 for no window; negative for chunks of that length: a
    # row sees those of its own chunk
    window: int = 0
    rope: int = 0  # index in ``Architecture.frequencies``; -1 for no rotation
    ordered: bool = False  # whether rows see no later rows even in a part whose rows see each other (``Part.mutual``)
    experts: Experts | None = None  # the MLP if its kind is "experts"
    sizes: HeadSizes | None = None  # sizes of its attention; None for those of the architecture
    source: int | None = None  # index of the earlier layer whose keys and values its attention reads; None for its own
    tied_values: bool = False  # whether the matrix of its keys makes its values too
    inner: int | None = None  # width of its dense MLP; None for that of the architecture

    @property
    def view(self) -> tuple[int, bool]:
        """The fields that decide which keys a row sees: ``window`` and ``ordered``."""
        return self.window, self.ordered


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of single layers beside the residual stream (Gemma 3n and 4): tokens have an embedding for every layer.

    The input of layer i is (norm(projection(embedding))_i + embedding_of_layers_i) / sqrt(2). After its MLP, the layer
    adds norm(up(activation(gate(x)) * input)) to the residual stream x.
    """

    width: int  # elements of one layer's input
    table: str = "embed_tokens_per_layer"  # name of the embeddings of all layers, [vocab, layers * width]
    # name of the projection of the model's embedding, [layers * width, hidden]
    projection: str = "per_layer_model_projection"
    projection_norm: str = "per_layer_projection_norm"  # name of the norm of its result for one layer
    gate: str = "per_layer_input_gate"  # name of a layer's gate, [width, hidden], relative to the layer
    up: str = "per_layer_projection"  # name of a layer's last matrix, [hidden, width]
    norm: str = "post_per_layer_input_norm"  # name of the norm of the layer's addition
