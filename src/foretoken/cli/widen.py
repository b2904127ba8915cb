"""``foretoken widen``: widen a checkpoint without changing what it computes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import Json
from foretoken.core.artifacts import MODEL, Destination
from foretoken.core.errors import InvalidRequest

FIELDS = {
    "hidden": ("hidden_size", "d_model"),
    "intermediate": ("intermediate_size", "moe_intermediate_size", "d_ff"),
    "layers": ("num_hidden_layers", "num_layers", "num_decoder_layers"),
    "heads": ("num_attention_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "experts": ("num_experts",),
}
"""The fields that each of ``WideSizes`` sets, of those that a family's shape has."""


@dataclass(frozen=True, kw_only=True)
class WideSizes:
    """Sizes in place of the preset's."""

    hidden: int | None = option(None, "Hidden size, instead of the preset's.")
    intermediate: int | None = option(None, "Neurons per layer or expert.")
    layers: int | None = option(None, "Layers, of a T5 in each stack, instead of the preset's.")
    heads: int | None = option(None, "Query heads, instead of the preset's.")
    kv_heads: int | None = option(None, "Key and value heads, instead of the preset's.")
    experts: int | None = option(None, "Experts of a hybrid, instead of the preset's.")

    def applied(self, shape: Any, family: str) -> Any:
        """Returns the shape of a family with these sizes. Raises InvalidRequest for one that the family lacks."""
        given: dict[str, int] = {}
        for name, value in vars(self).items():
            if value is not None:
                fields = [field for field in FIELDS[name] if hasattr(shape, field)]
                if not fields:
                    option = f"--{name.replace('_', '-')}"
                    raise InvalidRequest(f"a {family!r} model has no size that {option} sets; leave it out")
                given |= dict.fromkeys(fields, value)
        return replace(shape, **given)


@grouped
def widen(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a Llama, T5 or hybrid, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    size: str | None = option(
        None,
        "The size to reach: 0.7b, 1b, 3b or 7b, narrower if SRC has more layers; of a T5 t5-base or t5-large "
        "(0.7 B); of a hybrid 0.5b-a0.1b or 3b-a0.5b, with the parameters that a row reads.",
    ),
    *,
    sizes: WideSizes,
    head: list[Path] | None = option(None, "Heads for SRC, to be widened into DST/heads; may be repeated."),
    seed: int = option(0, "Of the rotation and of what fills up."),
    force: bool = option(False, "Replace an earlier model in DST.", "--force"),
    as_json: Json = False,
) -> None:
    """Write a checkpoint that computes what SRC computes at the cost of a larger model."""
    from foretoken.models.formats.checkpoint import resolve
    from foretoken.train.widen import checkpoint as up

    heads = [folder.expanduser().absolute() for folder in head or ()]
    Destination.checked(out, MODEL, (source, *heads), force)
    source = resolve(source).absolute()
    config = up.read_config(source)
    family = config["model_type"]
    shape = sizes.applied(up.fitted(size, config), family)
    result = up.widen_checkpoint(source, out, shape, seed, heads, force)
    if as_json:
        print(json.dumps({"path": str(result.path), "parameters": result.parameters, "bytes": result.bytes}))
    else:
        print(f"{result.path}: {result.parameters / 1e9:.2f} B parameters, {result.bytes / 1e9:.2f} GB")
