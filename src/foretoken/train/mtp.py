"""Multi-token-prediction layers (2412.19437, section 2.2), trained by unrolling one layer as it is chained.

The checkpoint has the layout of Qwen3.5, in a folder of its own: a layer with gated attention and norms of queries and
keys, whatever the target's are, and with experts if the target is a mixture of experts of that family. Other engines
load it only beside a Qwen3.5 target with the same sizes. A target's own layer, if it has one, is where training starts.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.artifacts import MODEL, PROVENANCE, Destination
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.core.schema import read_object
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.shards import ShardWriter, copy_companions
from foretoken.models.heads.layers import rotated_fraction, unroll
from foretoken.models.heads.mtp import HIDDEN_KEY
from foretoken.quantize.run import checkpoint_folder
from foretoken.train.config import MtpTrainConfig
from foretoken.train.frozen_target import FrozenTarget, TrainBatch
from foretoken.train.head import Drafted, Head, decoder_config, start_near_target
from foretoken.train.hybrid import HybridLayer, MtpBlock
from foretoken.train.shapes import HYBRID_TYPE


class MtpHead(Head):
    """An MTP layer. Its state_dict is the checkpoint, under Qwen3.5's names.

    Row i takes the embedding of token i + 1 and the state at row i, and proposes token i + 2. At depth 0 the state is
    the target's after the final norm. At depth j it is the layer's own output, normed, at row i - 1 of depth j - 1.
    """

    samples = True

    def __init__(self, config: MtpTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.depths, self.settings, self._unrolled = config.depths, config, config.depths
        sparse = target.config.model_type == HYBRID_TYPE
        intermediate = None if sparse else config.intermediate
        self.mtp = MtpBlock(target.config, intermediate=intermediate, heads=config.heads, kv_heads=config.kv_heads)
        shipped = _shipped_layer(target.path)
        if shipped and {n: t.shape for n, t in shipped.items()} == {n: t.shape for n, t in self.state_dict().items()}:
            self.start(shipped)
        else:
            self._start_from(target)

    @property
    def layer(self) -> HybridLayer:
        layer = self.mtp.layers[0]
        assert isinstance(layer, HybridLayer)
        return layer

    @torch.no_grad()
    def _start_from(self, target: FrozenTarget) -> None:
        """Initializes with the target's state, and its last layer where shapes fit."""
        start_near_target(self.mtp.fc, self.mtp.norm.weight, target, offset=1.0)
        self.layer.start_from(target.layer(-1))

    def begin(self, progress: float, step: int, length: int) -> None:
        self._unrolled = 1 if progress < self.settings.single_share else self.depths

    def forward(self, batch: TrainBatch) -> Drafted:
        depths = self._unrolled if self.training else self.depths
        outputs = unroll(
            lambda *inputs: self.mtp(*inputs)[0], batch.embedded(), batch.last()[:, : -self.depths], depths
        )
        return Drafted([batch.logits(hidden) for hidden in outputs])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        shape, attention = target.config, self.layer.self_attn
        states = {HIDDEN_KEY: {"normed": True, "chained_normed": True}}  # see models/heads/taps
        if shape.model_type == HYBRID_TYPE:
            sizes = {"num_attention_heads": attention.heads, "num_key_value_heads": attention.kv_heads}
            return {**load_config(target.path), **sizes, **states}
        common = decoder_config(target, target.layers, attention, self.settings.intermediate)
        del common["rope_theta"]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            **common,
            "layer_types": ["full_attention"] * target.layers,
            "attn_output_gate": True,
            "rope_parameters": {**common["rope_parameters"], "partial_rotary_factor": rotated_fraction(shape)},
            "tie_word_embeddings": bool(getattr(shape, "tie_word_embeddings", False)),
            **states,
        }


def _shipped_layer(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a target's own MTP layer in Qwen3.5's layout, none if it has no such layer."""
    weights = open_weights(path)
    return {name: weights[name] for name in weights if name.startswith("mtp.")}


def merge_mtp(layer: Path, target: Path, out: Path, force: bool = False) -> Path:
    """Writes a target's checkpoint with a trained MTP layer in the place of its own. Returns the folder.

    Args:
        layer: Folder of the layer, written by ``foretoken train mtp``.
        target: Folder or GGUF file of its target, a hybrid of Qwen3.5's layout.
        out: Folder to write.
        force: Whether to replace an earlier model at ``out``.

    Raises:
        InvalidRequest: The two do not belong together, or ``out`` must not be written.
        ModelLoadError: One of them cannot be read.
    """
    destination = Destination.checked(out, MODEL, (layer, target), force)
    target = checkpoint_folder(target)
    config, weights, trained = load_config(target), open_weights(target), open_weights(layer)
    names = {name for name in trained if name.startswith("mtp.")}
    if config.get("model_type") != HYBRID_TYPE:
        raise InvalidRequest(f"{target} is a {config.get('model_type')!r} model; {HYBRID_TYPE} models ship MTP layers")
    replaced = {name for name in weights if name.startswith("mtp.")}
    if not names or (replaced and {n: trained.shapes[n] for n in names} != {n: weights.shapes[n] for n in replaced}):
        raise InvalidRequest(f"{layer} has no MTP layer of the shape of the one in {target}; train it for this target")
    with destination.folder() as folder:
        writer = ShardWriter(folder)
        for name in sorted(weights.keys() - replaced):
            writer.add(name, weights[name])
        for name in sorted(names):
            writer.add(name, trained[name])
        writer.close(total_parameters=writer.parameters)
        copy_companions(target, folder)
        write_json(folder / "config.json", config | {HIDDEN_KEY: load_config(layer)[HIDDEN_KEY]})
        facts, layer_facts = (
            (read_object(f / PROVENANCE) if (f / PROVENANCE).exists() else {}) for f in (target, layer)
        )
        write_json(folder / PROVENANCE, facts | {"mtp": layer_facts})
    return destination.path
