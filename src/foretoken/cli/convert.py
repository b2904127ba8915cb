"""``foretoken convert``: writes heads in another engine's format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.options import MODEL
from foretoken.core import artifacts
from foretoken.core.artifacts import Destination, kind_of
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.files import write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foretoken.models.heads.dialects import Written


_MEDUSA = re.compile(r"(medusa_heads?|blocks)\.|[0-9]+\.[0-9]+\.")  # names of tensors of Medusa heads


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder of EAGLE, MTP, DFlash, JetSpec, DSpark or Medusa heads.")
    ],
    out: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[
        str,
        typer.Option(
            help="sglang, vllm, speculators, medusa, original (DFlash, DSpark), or checkpoint: the target with its MTP "
            "layer in it."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            *MODEL,
            help="The target: to write out its vocabulary head, or to settle which layers are tapped.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier heads of the same kind in DST.")] = False,
) -> None:
    """Write heads in another engine's format. The tensors stay bit-equal."""
    from safetensors.torch import save_file

    from foretoken.models.formats.checkpoint import resolve
    from foretoken.train.mtp import merge_mtp

    source = source.expanduser().absolute()
    if to == "checkpoint":
        if target is None:
            raise InvalidRequest("--to checkpoint writes the target with the layer in it; name the target by --target")
        print(f"{merge_mtp(source, resolve(target), out, force)}: the target with the layer in it")
        return
    held = kind_of(source)
    # of a model that ships MTP layers these are converted
    kind = artifacts.heads_of("mtp") if held in (None, artifacts.MODEL, artifacts.GGUF) else held
    inputs = (source, None if target is None else resolve(target))
    destination = Destination.checked(out, kind, inputs, force)
    config, tensors = _converted(source, to, target)
    with destination.folder() as folder:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        write_json(folder / "config.json", config)
        write_json(folder / artifacts.PROVENANCE, {"converted_from": source.name, "dialect": to})
    print(f"{destination.path}: {len(tensors)} tensors for {to}")


def _converted(source: Path, to: str, target: str | None) -> Written:
    from foretoken.models.heads.block import read_block
    from foretoken.models.heads.blockwise import MODEL_TYPE
    from foretoken.models.heads.dialects import BLOCK_DIALECTS, EAGLE_DIALECTS, write_block, write_eagle
    from foretoken.models.heads.eagle import read_eagle
    from foretoken.models.heads.files import open_head
    from foretoken.models.heads.medusa import MEDUSA_DIALECTS, read_medusa, write_medusa

    known = tuple(dict.fromkeys((*EAGLE_DIALECTS, *MEDUSA_DIALECTS, *BLOCK_DIALECTS)))
    if to not in known:
        raise InvalidRequest(f"--to {to!r} is not known; known: {', '.join(known)}")
    config, weights = open_head(source)
    if config.get("model_type") == MODEL_TYPE:
        raise InvalidRequest(f"{source} holds blockwise heads, which no other engine loads")
    if "hidden_norm.weight" in weights or "model.hidden_norm.weight" in weights:
        block = read_block(source)
        borrowed = target if target is not None and "lm_head.weight" not in block.tensors else None
        own = None if borrowed is None else _vocabulary(borrowed, block.tensors["fc.weight"].dtype)
        return write_block(block, to, own, target or "")
    if "mtp.fc.weight" in weights:
        return config, _with_ends(source, weights, to, target)
    if "fc.weight" in weights:
        head = read_eagle(source)
        return write_eagle(head, to, _taps(source, target) if target and not head.exact else None, target)
    if artifacts.heads_method(config) != "medusa" and not any(_MEDUSA.match(name) for name in weights):
        raise InvalidRequest(
            f"{source} is {kind_of(source)}, and convert writes EAGLE, MTP, DFlash, DSpark and Medusa heads in another "
            "engine's format; foretoken quantize changes the format of a model"
        )
    heads = read_medusa(source)
    if not heads.vocabulary and target is not None:
        heads = heads.with_vocabulary(_vocabulary(target, heads.blocks[0][0][0].dtype))
    return write_medusa(heads, to)


def _with_ends(source: Path, weights: Mapping[str, Tensor], to: str, target: str | None) -> dict[str, Tensor]:
    """Returns MTP layers with the target's embedding and vocabulary head, without which other engines do not load."""
    from foretoken.models.formats.checkpoint import load_config, resolve
    from foretoken.models.heads.files import ends_of

    if to not in ("vllm", "sglang"):
        raise InvalidRequest(f"MTP layers have no dialect {to!r}; known: vllm, sglang")
    if target is None:
        raise InvalidRequest(f"{source} shares the target's embedding; name the target by --target to write it out")
    path, tied = resolve(target), load_config(source).get("tie_word_embeddings")
    tensors, embedding, _ = ends_of(path)
    if embedding not in tensors:
        raise ModelLoadError(f"{path} has no embedding {embedding} that could be written out")
    ends = {"model.embed_tokens.weight": tensors[embedding]}
    if not tied:
        ends["lm_head.weight"] = _vocabulary(target, ends["model.embed_tokens.weight"].dtype)
    return {**ends, **{name: tensor for name, tensor in weights.items() if name.startswith("mtp.")}}


def _taps(source: Path, target: str) -> tuple[int, ...]:
    """Returns the target layers that the head reads, which config.json leaves open."""
    from foretoken.models.formats.checkpoint import load_tokenizer, resolve
    from foretoken.models.heads.loading import load_eagle
    from foretoken.models.loading import load_model

    path = resolve(target)
    return load_eagle(load_model(path), load_tokenizer(path), source, path).taps


def _vocabulary(target: str, dtype: torch.dtype) -> Tensor:
    """Returns the target's vocabulary head [V, H], or its embedding if the two are tied."""
    from foretoken.models.formats.checkpoint import resolve
    from foretoken.models.heads.files import ends_of

    path = resolve(target)
    weights, embedding, head = ends_of(path)
    stem = head.removesuffix("weight")
    quantized = head not in weights and any(name.startswith(stem) for name in weights)
    name = next((name for name in (head, embedding) if name in weights), None)
    if name is None or quantized:
        raise ModelLoadError(f"{path} has no {head} and no {embedding} to take its place, or they are quantized")
    return weights[name].to(dtype)
