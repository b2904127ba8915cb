"""``foretoken info``: the machine and its kernels. ``zoo``: bundled models. ``drafts``: drafters of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from foretoken.cli.options import Json
from foretoken.cli.theme import ColorMode, print_parts, wide_console
from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from foretoken.models.heads.published import FoundDrafter


_PACKAGES = (
    *("foretoken", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "huggingface_hub"),
    *("fastapi", "uvicorn", "llguidance", "ray", "vllm"),
)
_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"),
    *("avx512vbmi", "gfni", "amx_tile", "amx_bf16", "amx_int8", "asimddp", "i8mm", "bf16"),
)
_INSTALLED = {"pyvenv.cfg", "node_modules"}  # what a folder with installed programs contains
_VARIABLES = ("OMP_NUM_THREADS", "XDG_CACHE_HOME", "HF_HOME", "CUDA_VISIBLE_DEVICES")


def info(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Add the default drafter of a model on this machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the machine, the kernels chosen for it and why, and the versions: what a bug report needs."""
    facts = collect() | ({} if model is None else {"model": _model(model)})
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = wide_console(ColorMode.AUTO)
    for title, entries in facts.items():
        console.print(f"[bold]{title}[/]")
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            console.print(f"  {name:{width}}  {_text(value)}", markup=False)


def zoo(as_json: Json = False) -> None:
    """List the bundled models: name, role, size, path and card."""
    from foretoken.zoo import list_models

    models = list_models()
    if as_json:
        print(json.dumps([vars(m) | {"path": str(m.path)} for m in models], indent=2))
        return
    if not models:
        print("no bundled models in this installation; 'foretoken train target' makes one")
        return

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("name", "role", "parameters", "size", "path"):
        table.add_column(title, justify="right" if title in ("parameters", "size") else "left", overflow="fold")
    for m in models:
        table.add_row(m.name, m.role, f"{m.parameters / 1e6:.1f} M", f"{m.size_bytes / 1e6:.1f} MB", str(m.path))
    wide_console(ColorMode.AUTO).print(table)
    print("cards: README.md in each folder, or foretoken zoo --json")


def collect() -> dict[str, dict[str, Any]]:
    return {"machine": _machine(), "kernels": _kernels(), "versions": _versions(), "settings": _settings()}


def _model(name: str) -> dict[str, Any]:
    """Returns the names of a model and its default drafter. Raises InvalidRequest for a model that is not here."""
    from foretoken.models.heads.published import default_drafters, local_path, names_of

    path = local_path(name)
    if path is None:
        raise InvalidRequest(f"there is no folder or file {name!r}, and it is not in the hub's cache: hf download NAME")
    default = next(iter(default_drafters(path)), None)
    line = "drafter: none; text is copied" if default is None else default.line
    return {"path": str(path), "names": names_of(path), "default": line}


def _machine() -> dict[str, Any]:
    import platform

    from foretoken.bench.output import cores, memory, processor
    from foretoken.core.native.cpu import features

    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "features": [name for name in _FEATURES if name in features()],
        "cores": {"in the machine": os.cpu_count(), "used": cores()},
        "memory_gib": {"total": _gib(memory("MemTotal")), "available": _gib(memory("MemAvailable"))},
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    """Returns names and memory. Importing torch takes longer than all other facts, and its CPU build sees no GPU."""
    if "+cpu" in _version("torch"):
        return []
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {_gib(gpu.total_memory)} GiB" for gpu in gpus]


def _kernels() -> dict[str, Any]:
    from foretoken.core.native import build, cpu
    from foretoken.models.runners.native.build import prebuilt

    levels = [level.name for level in cpu.available()]
    try:
        level = build.require()
        found = prebuilt(level)
        libraries = "prebuilt, from the wheel" if found else "compiled here at first use"
        compiler = {} if found else {"compiler": " ".join(build.toolchain().command)}
    except (build.KernelsUnavailable, InvalidRequest) as reason:
        return {"runner": "torch operators", "why": str(reason), "levels": levels}
    facts = {"runner": "compiled", "why": cpu.reason(), "level": level.name, "levels": levels, "libraries": libraries}
    return facts | compiler


def _versions() -> dict[str, Any]:
    import platform

    found = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: value for name, value in found.items() if value}}


def _version(package: str) -> str:
    """Returns the version of an installed package, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _settings() -> dict[str, Any]:
    from foretoken.core.files import cache_folder

    folder = cache_folder()
    names = sorted({name for name in os.environ if name.startswith("FORETOKEN_")} | {*_VARIABLES} & os.environ.keys())
    return {
        "cache": {"folder": str(folder), "mib": round(sum(_sizes(folder)) / 2**20, 1)},
        # the key is a secret; that it is set matters
        "environment": {name: "(set)" if name.endswith("_KEY") else os.environ[name] for name in names},
    }


def _sizes(folder: Path) -> Iterator[int]:
    """Yields the sizes of files, without the programs that benchmarks install: these may be a hundred thousand."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    if not _INSTALLED.isdisjoint(entry.name for entry in entries):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _sizes(Path(entry))
            continue
        with suppress(OSError):  # it may have been deleted meanwhile
            yield entry.stat(follow_symlinks=False).st_size


def _gib(size: int) -> float:
    return round(size / 2**30, 1)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def drafts(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Target model: a folder, GGUF file or hub name.")],
    as_json: Json = False,
) -> None:
    """List the published drafters of a model, and those that are on this machine. Downloads nothing."""
    from foretoken.models.heads.published import published_drafters

    found = published_drafters(model)
    if as_json:
        print(json.dumps([_record(drafter) for drafter in found], indent=2))
    else:
        print_parts(wide_console(ColorMode.AUTO), _parts(model, found))


def _record(drafter: FoundDrafter) -> dict[str, Any]:
    row, path = drafter.row, None if drafter.path is None else str(drafter.path)
    facts = {name: getattr(row, name) for name in ("target", "form", "method", "licence", "source")}
    return {"drafter": row.name, **facts, "place": drafter.place, "path": path}


def _parts(model: str, found: list[FoundDrafter]) -> Iterator[Any]:
    if not found:
        yield f"no drafter of {escape(model)} is known; any model with the same tokenizer may draft: --draft-model NAME"
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("drafter", "target", "form", "licence", "place", "source"):
        table.add_column(title, overflow="fold")
    for row, place in ((drafter.row, drafter.place) for drafter in found):
        table.add_row(row.name, row.target, row.form, row.licence, place, row.source)
    yield table
    yield "use one: --draft-model NAME, which downloads it; the first one that is here: --draft-model auto"
