"""Puts a trained MTP layer into its target's checkpoint, as models that ship one have it."""

from __future__ import annotations

from pathlib import Path

from foretoken.core.artifacts import MODEL, Destination
from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import read_object
from foretoken.models.formats.checkpoint import load_config
from foretoken.models.heads.mtp import HIDDEN_KEY
from foretoken.quantize.cached import checkpoint_folder
from foretoken.train.files import PROVENANCE, write_json
from foretoken.train.hybrid.shape import MODEL_TYPE
from foretoken.train.shards import ShardReader, ShardWriter, copy_companions


def ship(layer: Path, target: Path, out: Path, force: bool = False) -> Path:
    """Writes the target with the layer in the place of its own. Returns the folder.

    Args:
        layer: Folder of ``foretoken train mtp``.
        target: Folder or GGUF file of its target, a hybrid of Qwen3.5's layout.
        out: Folder to write.
        force: Whether to replace an earlier model at ``out``.

    Raises:
        InvalidRequest: The two do not belong together, or ``out`` must not be written.
        ModelLoadError: One of them cannot be read.
    """
    destination = Destination.checked(out, MODEL, (layer, target), force)
    target = checkpoint_folder(target)
    config, theirs, own = load_config(target), ShardReader(target), ShardReader(layer)
    names = {name for name in own.names if name.startswith("mtp.")}
    if config.get("model_type") != MODEL_TYPE:
        raise InvalidRequest(f"{target} is a {config.get('model_type')!r} model; {MODEL_TYPE} models ship MTP layers")
    replaced = {name for name in theirs.names if name.startswith("mtp.")}
    if not names or (replaced and {n: own.shape(n) for n in names} != {n: theirs.shape(n) for n in replaced}):
        raise InvalidRequest(f"{layer} has no MTP layer of the shape of the one in {target}; train it for this target")
    with destination.folder() as folder:
        writer = ShardWriter(folder)
        for name in sorted(theirs.names - replaced):
            writer.add(name, theirs.get(name))
        for name in sorted(names):
            writer.add(name, own.get(name))
        writer.close()
        copy_companions(target, folder)
        write_json(folder / "config.json", config | {HIDDEN_KEY: load_config(layer)[HIDDEN_KEY]})
        facts, trained = ((read_object(f / PROVENANCE) if (f / PROVENANCE).exists() else {}) for f in (target, layer))
        write_json(folder / PROVENANCE, facts | {"mtp": trained})
    return destination.path
