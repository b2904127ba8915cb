"""Commands that write models and datastores: ``quantize``, ``convert``, ``widen`` and ``build-datastore``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import zoo
from foretoken.cli.files import standard_input
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import MODEL, Json
from foretoken.core import artifacts
from foretoken.core.artifacts import Destination, kind_of
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.files import read_text, write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foretoken.models.heads.dialects import Written
    from foretoken.quantize import QuantizedCheckpoint


@grouped
def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, GGUF file or hub name; or a folder of heads.")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write, or a file that ends with .gguf.")],
    scheme: Annotated[
        str,
        typer.Option(
            help="A folder: int8, int4-g32, int4-g64, int4-g128, bfloat16, float16, float32. GGUF: Q8_0, Q6_K, Q5_K_M, "
            "Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, Q4_1, Q4_0, Q3_K_L, Q3_K_M, Q3_K_S, BF16, F16, F32."
        ),
    ],
    calibration: str | None = option(
        None, "Text like the model's use: rounds by GPTQ, and tells the loss.", metavar="FILE|-"
    ),
    lm_head: bool = option(False, "Quantize the vocabulary head of a folder as well. GGUF always does.", "--lm-head"),
    gguf_file: str | None = option(None, "Name of a GGUF file in SRC."),
    force: bool = option(False, "Replace an earlier DST of the same kind.", "--force"),
    as_json: Json = False,
) -> None:
    """Write a checkpoint with fewer bits a weight: compressed-tensors (vLLM) or GGUF (llama.cpp)."""
    text = None if calibration is None else _text(calibration)
    from foretoken.core.progress import Reporter
    from foretoken.quantize import quantize_checkpoint

    with Reporter(f"quantizing to {scheme}") as reporter:
        result = quantize_checkpoint(
            source, out, scheme, text, lm_head=lm_head, force=force, gguf_file=gguf_file, progress=reporter.update
        )
    print(json.dumps(_record(result), indent=2) if as_json else _line(result))


def _text(name: str) -> str:
    """Returns the calibration text. Raises InvalidRequest."""
    if name == "-":
        return standard_input(sys.stdin.read)
    return read_text("the calibration text", Path(name).expanduser(), "a text file")


def _record(result: QuantizedCheckpoint) -> dict[str, Any]:
    sizes = {"bytes_before": result.bytes_before, "bytes_after": result.bytes_after}
    losses = {f"loss_{name}": getattr(result.losses, name, None) for name in ("before", "after", "tokens")}
    seconds = round(result.seconds, 3)
    return {"path": str(result.path), "scheme": result.scheme, **sizes, "seconds": seconds, **losses}


def _line(result: QuantizedCheckpoint) -> str:
    sizes = f"{result.bytes_before / 1e6:.1f} MB -> {result.bytes_after / 1e6:.1f} MB in {result.seconds:.1f} s"
    losses = result.losses
    if losses is None:
        return f"{result.path}: {result.scheme}, {sizes}"
    return f"{result.path}: {result.scheme}, {sizes}; held-out loss {losses.before:.4f} -> {losses.after:.4f}"


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
    from foretoken.models.heads.dialects import BLOCK_DIALECTS, EAGLE_DIALECTS, write_block, write_eagle
    from foretoken.models.heads.eagle import read_eagle
    from foretoken.models.heads.files import open_head
    from foretoken.models.heads.medusa import MEDUSA_DIALECTS, MODEL_TYPE, read_medusa, write_medusa

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
    Destination.checked(out, artifacts.MODEL, (source, *heads), force)
    source = resolve(source).absolute()
    config = up.read_config(source)
    family = config["model_type"]
    shape = sizes.applied(up.fitted(size, config), family)
    result = up.widen_checkpoint(source, out, shape, seed, heads, force)
    if as_json:
        print(json.dumps({"path": str(result.path), "parameters": result.parameters, "bytes": result.bytes}))
    else:
        print(f"{result.path}: {result.parameters / 1e9:.2f} B parameters, {result.bytes / 1e9:.2f} GB")


PIECE = 1 << 20  # characters that are tokenized together; longer documents are split


@grouped
def build_datastore(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    data: Annotated[list[Path], typer.Option(help="A text file, or a folder of .py, .md and .txt (repeatable).")],
    model: str | None = option(None, "The target it is for: its tokenizer is used. [bundled]", *MODEL),
    force: bool = option(False, "Replace an earlier datastore in OUT.", "--force"),
    as_json: Json = False,
) -> None:
    """Build a datastore: then --speculative-config '{"method": "retrieval", "model": "OUT"}'."""
    from foretoken.core.progress import Reporter
    from foretoken.models.formats.checkpoint import load_tokenizer, resolve
    from foretoken.propose.retrieval import DatastoreWriter
    from foretoken.train.data import text_files

    path = resolve(model) if model is not None else zoo.path("target")
    destination = Destination.checked(out, artifacts.DATASTORE, (path, *data), force)
    if not (files := text_files(data)):
        raise InvalidRequest("the folders hold no .py, .md or .txt file; name the files themselves")
    tokenizer = load_tokenizer(path)
    with destination.folder() as folder, Reporter("build-datastore") as reporter:
        writer = DatastoreWriter(folder, tokenizer)
        size, done = sum(file.stat().st_size for file in files), 0
        for texts in _batches(files):
            # verbose=False: documents may exceed the model's context length.
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                writer.add(ids)
            done += sum(len(text.encode()) for text in texts)
            reporter.update(min(1.0, done / max(1, size)), f"{writer.tokens / 1e6:.1f} M tokens")
        writer.close()
        write_json(
            folder / artifacts.PROVENANCE, {"model": model or "bundled target", "data": data, "files": len(files)}
        )
    out = destination.path
    facts = {"path": str(out), "tokens": writer.tokens, "documents": writer.documents, "bytes": writer.nbytes}
    text = f"{out}: {writer.tokens:,} tokens of {len(files):,} file(s), {writer.nbytes / 1e6:.1f} MB"
    print(json.dumps(facts) if as_json else text)


def _batches(files: list[Path]) -> Iterator[list[str]]:
    """Yields pieces of whole lines, in batches of about ``PIECE`` characters."""
    batch: list[str] = []
    held = 0
    for file in files:
        try:
            with file.open(encoding="utf-8", errors="ignore") as handle:
                while lines := handle.readlines(PIECE):
                    batch.append("".join(lines))
                    held += len(batch[-1])
                    if held >= PIECE:
                        yield batch
                        batch, held = [], 0
        except OSError as error:
            raise InvalidRequest(f"cannot read {file}: {error.strerror}; leave it out, or make it readable") from error
    if batch:
        yield batch
