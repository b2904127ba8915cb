"""``foretoken scale-up``: widen a checkpoint without changing what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def scale_up(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a Llama checkpoint (safetensors).")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    like: Annotated[str, typer.Option(help="The size to reach: 0.7b, 1b, 3b or 7b.")] = "0.7b",
    hidden: Annotated[int | None, typer.Option(help="Hidden size, instead of the preset's.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Neurons per layer, instead of the preset's.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, instead of the preset's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads, instead of the preset's.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads, instead of the preset's.")] = None,
    head: Annotated[
        list[Path] | None, typer.Option(help="Heads for SRC, to be widened into DST/heads; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the rotation and of what fills up.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace DST whatever it holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a checkpoint that computes what SRC computes at the cost of a larger model."""
    import json
    from dataclasses import replace

    from foretoken.core.errors import InvalidRequest
    from foretoken.train import scale_up as up
    from foretoken.train.files import check_output
    from foretoken.train.scale_heads import scale_head

    out, source = check_output(out, force), source.expanduser().absolute()
    if out == source:
        raise InvalidRequest("SRC and DST are the same folder; name another DST")
    shape = up.like(like, up.read_config(source)["head_dim"])
    chosen = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip
    shape = replace(shape, **{name: value for name, value in chosen.items() if value is not None})
    result = up.scale_up(source, out, shape, seed)
    for folder in head or ():
        scale_head(folder.expanduser().absolute(), source, out)
    if as_json:
        print(json.dumps({"path": str(result.path), "parameters": result.parameters, "bytes": result.bytes}))
    else:
        print(f"{result.path}: {result.parameters / 1e9:.2f} B parameters, {result.bytes / 1e9:.2f} GB")
