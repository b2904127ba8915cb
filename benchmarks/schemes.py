"""Time of a pass by rows for weight schemes in turns, beside what memory and the multipliers allow at best.

    python benchmarks/schemes.py --scheme int8 --scheme model-Q4_0.gguf
    python benchmarks/schemes.py --scheme bf16 --scheme packed --loads 3
    python benchmarks/schemes.py --wheel dist/foretoken-*.whl

A scheme is "bf16", "packed" (bfloat16 in 12 bits), a quantization ("int8", "int4", "int4-g64"), or a GGUF file. Every
round times each scheme at each number of rows, then reads as many bytes as its weights take, and runs as many vpdpbusd
instructions as its products need. A pass cannot take less than the larger of the two.

With a wheel (``make wheel``, built from these sources by Zig), each scheme runs on the wheel's kernels and on those
compiled here. Logits of these, and of packed and raw bfloat16, must be equal bit by bit, or the exit code is 1.
"""

import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from foretoken.bench.costs import Loaded, chain, matrices, scoring
from foretoken.bench.measure import TimedTask, interleaved
from foretoken.bench.output import cores, listing, report
from foretoken.core.errors import InvalidRequest
from foretoken.core.native import build
from foretoken.models.base import Handle, Model
from foretoken.models.formats.memory import give_back
from foretoken.models.runners.native.build import loaded_library, prebuilt
from foretoken.models.runners.native.runner import NativeRunner
from options import Output, Rows, Small, Target, Turns, target_path
from systems import Floors

BF16, PACKED = "bf16", "packed"
COLUMNS = {
    "scheme": "{scheme}",
    "MB": "{megabytes:.0f}",
    "rows": "{rows}",
    "ms": "{pass_:.2f}",
    "over the first rows": "{over_one:.2f}",
    "over the reference": "{over_reference:.3f}",
    "same bits": "{same_bits}",
    "reading, ms": "{read:.1f}",
    "vpdpbusd alone, ms": "{multiply:.1f}",
}


@dataclass(frozen=True)
class Variant:
    """One way to compute the target. reference: the variant whose logits it must have, "" if there is none."""

    scheme: str
    name: str
    load: Callable[[], Loaded]
    reference: str = ""


def load(target: Path, scheme: str, weight_format: str = "raw", kernels: Path | None = None) -> Loaded:
    """Loads the target in a scheme. Raises InvalidRequest if the scheme does not run on the compiled kernels here.

    weight_format: Of bfloat16 weights. kernels: Folder of libraries in place of those of the package; those that it
    lacks are compiled.
    """
    loaded_library.cache_clear()
    with nullcontext() if kernels is None else patch.object(build, "SHIPPED", kernels):
        if scheme.endswith(".gguf"):
            loaded = Loaded.of(Path(scheme))
        elif scheme == PACKED:
            loaded = Loaded.of(target, weight_format=PACKED)
        else:
            loaded = Loaded.of(target, "" if scheme == BF16 else scheme, weight_format=weight_format)
    loaded_library.cache_clear()
    if not isinstance(getattr(loaded.model, "runner", None), NativeRunner):
        raise InvalidRequest(f"{scheme} does not run on the compiled kernels here")
    return loaded


def variants(target: Path, schemes: Sequence[str], kernels: Path | None) -> Iterator[Variant]:
    """Yields the schemes or, if there are kernels of a wheel, each scheme with both kernels."""
    for scheme in schemes:
        if kernels is None:
            reference = BF16 if scheme == PACKED and BF16 in schemes else ""
            yield Variant(scheme, Path(scheme).name, partial(load, target, scheme), reference)
            continue
        for place, folder in (("compiled here", kernels / "none"), ("wheel", kernels)):
            reference = f"{scheme}, compiled here" if place == "wheel" else ""
            yield Variant(scheme, f"{scheme}, {place}", partial(load, target, scheme, "auto", folder), reference)


def last_logits(model: Model, handle: Handle, rows: int) -> Tensor:
    """Returns the bits of the logits of a pass over ``rows`` rows, which is rewound."""
    with torch.inference_mode():
        logits = model.score([handle], [chain(rows)])[0].logits.clone()
    model.commit([handle], [()])
    return logits.view(torch.int32)


def measure(chosen: Sequence[Variant], rows: Sequence[int], context: int, turns: int) -> list[dict[str, Any]]:
    """Times all variants and numbers of rows in rotating order. Returns records with times in milliseconds."""
    models = {each.name: each.load() for each in chosen}
    handles = {name: loaded.open(context) for name, loaded in models.items()}
    sizes = {
        each.name: Path(each.scheme).stat().st_size if each.scheme.endswith(".gguf") else loaded.weights_bytes
        for each, loaded in zip(chosen, models.values(), strict=True)
    }
    floors = Floors(max(sizes.values()), "-mavx512vnni")
    tasks: dict[tuple[str, str, int], TimedTask] = {}
    for each in chosen:
        loaded = models[each.name]
        tasks["read", each.name, 0] = floors.reading(sizes[each.name])
        products = sum(outputs * inputs for outputs, inputs in matrices(loaded.config))
        for count in rows:
            tasks["pass", each.name, count] = scoring(loaded.model, [handles[each.name]], count)
            if each.scheme not in (BF16, PACKED):
                tasks["multiply", each.name, count] = floors.multiplying(products * count)
    times = {key: 1000 * spread.median for key, spread in interleaved(tasks, turns).items()}
    records = []
    for each in chosen:
        for count in rows:
            took = times["pass", each.name, count]
            record = {
                "scheme": each.name,
                "rows": count,
                "megabytes": sizes[each.name] / 1e6,
                "weight_bytes": models[each.name].model.runner.weight_bytes,  # type: ignore[attr-defined]
                "pass_": took,
                "over_one": took / times["pass", each.name, rows[0]],
                "read": times["read", each.name, 0],
                "multiply": times.get(("multiply", each.name, count)),
            }
            if each.reference:
                one, other = (last_logits(models[n].model, handles[n], count) for n in (each.name, each.reference))
                record["over_reference"] = took / times["pass", each.reference, count]
                record["same_bits"] = torch.equal(one, other)
            records.append(record)
    return records


def load_seconds(chosen: Sequence[Variant], turns: int) -> dict[str, float]:
    """Returns the median seconds of loading by variant, in turns; the first load, which reads the disk, is skipped."""

    def loading(each: Variant) -> None:
        each.load()

    tasks = {each.name: TimedTask(partial(loading, each), give_back) for each in chosen}
    return {name: spread.median for name, spread in interleaved(tasks, turns).items()} if turns else {}


def unpacked(wheel: Path, folder: Path) -> Path:
    """Returns the folder of a wheel's kernels. Raises InvalidRequest if they are not those of these sources."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("foretoken/_kernels/")])
    kernels, level = folder / "foretoken" / "_kernels", build.require()
    with patch.object(build, "SHIPPED", kernels):
        if not prebuilt(level):
            raise InvalidRequest(
                f"the wheel has no kernels of {level.name} from these sources; build it with make wheel"
            )
    return kernels


def main(
    target: Target = None,
    scheme: Annotated[
        list[str], typer.Option(help='"bf16", "packed", a quantization, a GGUF file; may be repeated.')
    ] = [BF16, "int8", "int4", "int4-g64"],
    wheel: Annotated[Path | None, typer.Option(exists=True, help="A wheel from make wheel.")] = None,
    rows: Rows = [1, 4, 8, 16],
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    turns: Turns = 15,
    loads: Annotated[int, typer.Option(min=0, help="Timed loads of each scheme.")] = 0,
    small: Small = False,
    output: Output = None,
) -> None:
    """Time passes of each scheme in turns, beside reading the weights and their vpdpbusd instructions alone."""
    torch.set_num_threads(cores())
    with tempfile.TemporaryDirectory() as scratch:
        kernels = unpacked(wheel, Path(scratch)) if wheel else None
        chosen = list(variants(target_path(target, small), scheme, kernels))
        load = load_seconds(chosen, loads)
        times = measure(chosen, rows, context, turns)
    said = [f"loading {name}: {seconds:.2f} s" for name, seconds in load.items()]
    facts = {"kernels": build.require().name, "context": context}
    report([listing(COLUMNS, times), *said], facts, output, times=times, load_seconds=load)
    raise typer.Exit(any(record.get("same_bits") is False for record in times))


if __name__ == "__main__":
    typer.run(main)
