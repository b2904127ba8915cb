"""``foretoken widen``: a checkpoint that computes the same as a small one at the cost of a large one.

The mathematics is in ``widen.units``. Each family has a module with the same functions.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken import zoo
from foretoken.core.artifacts import MODEL, PROVENANCE, Destination
from foretoken.core.errors import InvalidRequest, TrainingError
from foretoken.core.files import write_json
from foretoken.core.progress import Reporter
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.reader import TensorReader
from foretoken.models.formats.shards import ShardWriter, copy_companions, weights_sha256
from foretoken.quantize.run import checkpoint_folder
from foretoken.train.shapes import HYBRID_TYPE, HybridShape, T5Shape
from foretoken.train.widen import hybrid, llama, seq2seq
from foretoken.train.widen.heads import scale_bundled, widen_head
from foretoken.train.widen.llama import WideShape

AnyShape = WideShape | T5Shape | HybridShape
FAMILIES: dict[str, Any] = {"llama": llama, "mistral": llama, "t5": seq2seq, HYBRID_TYPE: hybrid}
"""The module of each ``model_type``."""

_FORMAT = 1  # version of cached checkpoints
_NAMES = {WideShape: "Llama", T5Shape: "T5", HybridShape: "hybrid"}


@dataclass(frozen=True)
class Scaled:
    """A written checkpoint, with the number of its parameters and the bytes of its weights."""

    path: Path
    parameters: int
    bytes: int


def like(name: str, head_dim: int = 64, family: str = "llama") -> AnyShape:
    """Returns the shape of a usual model of that size and family. Raises InvalidRequest for an unknown name."""
    module = FAMILIES[family]
    if name not in module.PRESETS:
        raise InvalidRequest(f"unknown size {name!r}; known: {', '.join(module.PRESETS)}")
    shape: AnyShape = module.like(name, head_dim)
    return shape


def fitted(name: str | None, config: dict[str, Any]) -> AnyShape:
    """Returns the shape of a usual model of that size for a source, which may have more layers, heads or units.

    None for the family's usual size.
    """
    module = FAMILIES[config["model_type"]]
    shape: AnyShape = module.fitted(like(name or module.USUAL, config["head_dim"], config["model_type"]), config)
    return shape


def read_config(source: Path) -> dict[str, Any]:
    """Returns the source's config.

    Raises:
        ModelLoadError: It cannot be read.
        InvalidRequest: It is neither a plain Llama, nor a T5, nor a hybrid of Qwen3.5's layout.
    """
    config = load_config(source)
    if (family := config.get("model_type")) not in FAMILIES:
        *others, last = FAMILIES
        raise InvalidRequest(
            f"cannot widen a {family!r} model; {', '.join(others)} and {last} checkpoints can be widened"
        )
    result: dict[str, Any] = FAMILIES[family].checked(config)
    return result


def widen_checkpoint(
    source: Path, out: Path, shape: AnyShape, seed: int = 0, heads: Sequence[Path] = (), force: bool = False
) -> Scaled:
    """Writes a wider Llama, T5 or hybrid that computes the same as the source, up to rounding.

    Works in float64, one layer at a time, and writes the source's dtype with untied embeddings.

    Args:
        source: Folder or GGUF file of the source.
        out: Folder of the wide model.
        shape: Its size.
        seed: Seed of the rotation and of filler units.
        heads: Folders of heads for the source, which are widened into ``out/heads``.
        force: Whether to replace an earlier model at ``out``.

    Raises:
        InvalidRequest: The source cannot be widened to ``shape``, or ``out`` must not be written.
        ModelLoadError: The source cannot be read.
        TrainingError: The disk has too little space.
    """
    destination = Destination.checked(out, MODEL, (source, *heads), force)
    source = checkpoint_folder(source)
    config = read_config(source)
    family = FAMILIES[config["model_type"]]
    if heads and family is not llama:
        raise InvalidRequest(f"heads are widened for a Llama, not for a {config['model_type']!r} model")
    if not isinstance(shape, family.SHAPE):
        raise InvalidRequest(
            f"a {config['model_type']!r} model cannot grow to the size of a {_NAMES[type(shape)]}; "
            f"choose one of {', '.join(family.PRESETS)} with --size"
        )
    plan = family.plan(TensorReader(open_weights(source), torch.float64), config, shape, seed)
    needed = plan.parameters * plan.dtype.itemsize
    existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if shutil.disk_usage(existing).free < needed:
        raise TrainingError(f"{out} needs {needed / 1e9:.1f} GB and the disk has less free; free some space")
    with destination.folder() as folder, Reporter("widening") as report:
        writer = ShardWriter(folder)
        for name, tensor in plan.tensors:
            writer.add(name, tensor.to(plan.dtype))
            report.update(writer.bytes / needed, f"{writer.bytes / 1e9:.2f} GB")
        writer.close(total_parameters=writer.parameters)
        copy_companions(source, folder)
        write_json(folder / "config.json", plan.config)
        facts = {
            "widened_from": source.name,
            "source_sha256": weights_sha256(source),
            "seed": seed,
            "shape": asdict(shape),
            "layers": plan.layers,
            "parameters": writer.parameters,
        }
        write_json(folder / PROVENANCE, facts)
        for head in heads:
            widen_head(head, source, folder)
    return Scaled(destination.path, writer.parameters, writer.bytes)


def scaled(like_name: str = "0.7b", model: str = "target") -> Path:
    """Returns a bundled model (name or role) widened to a usual size. It is built once and cached.

    The target's heads are in its folder.

    Raises:
        InvalidRequest: A name is not known.
        TrainingError: The disk has too little space.
    """
    source = zoo.path(model)
    config = read_config(source)
    shape = fitted(like_name, config)
    key = hashlib.sha256(f"{_FORMAT} {shape} {weights_sha256(source)}".encode()).hexdigest()[:12]
    out = zoo.cache_folder() / "scaled" / f"{source.name}-{like_name}-{key}"
    if not (out / "config.json").exists():
        widen_checkpoint(source, out, shape)
    if source == zoo.path("target"):
        scale_bundled(out)
    return out
