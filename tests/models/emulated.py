"""Runs the kernels of another processor or system on cases in C++ (``cross/``), in an emulator."""

import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from foretoken.core.native import build, cpu
from foretoken.core.native.toolchain import Toolchain
from foretoken.models.runners.native.build import CACHES, Kind, ScaleKind, decoder_sources, grouped_kind

from .products import PRODUCTS, SOURCES

HERE = Path(__file__).parent
KINDS = (  # those that cases.cpp has
    Kind.FLOAT32,
    Kind.BFLOAT16,
    Kind.INT8,
    Kind.PACKED,
    grouped_kind(4, False, ScaleKind.HALF),
    grouped_kind(8, False, ScaleKind.HALF),
    grouped_kind(4, True, ScaleKind.SINGLE),
    grouped_kind(6, False, ScaleKind.TWO_LEVELS),
    grouped_kind(4, True, ScaleKind.TWO_LEVELS),
    grouped_kind(6, True, ScaleKind.TWO_LEVELS),
)


def level_of(name: str) -> cpu.Level:
    return next(level for level in cpu.LEVELS if level.name == name)


def compiled(tools: Toolchain, folder: Path, main: str = "cases.cpp", optimize: str = "-O1") -> Path:
    """Returns the program of a file of ``cross``, which is kept in ``folder`` by its content as libraries are."""
    sources = [*(HERE / "cross").iterdir(), *build.SHARED.glob("*.hpp"), *SOURCES.glob("*.hpp")]
    flags = (optimize, "-std=c++17", "-w", "-ffp-contract=off")
    digest = hashlib.sha256(repr([tools.command, tools.linking, flags]).encode())
    for source in sorted(sources):
        digest.update(source.read_bytes())
    program = folder / f"{Path(main).stem}-{digest.hexdigest()[:16]}{'.exe' if tools.suffix == '.dll' else ''}"
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / program.name
            loading = ["-ldl"] if tools.suffix == ".so" else []
            command = [*tools.command, *tools.linking, *flags, f"-I{build.SHARED}", f"-I{SOURCES}"]
            subprocess.run([*command, str(HERE / "cross" / main), "-o", str(made), *loading], check=True)
            made.replace(program)
    return program


def output(level: cpu.Level, tools: Toolchain | None = None, emulator: Sequence[str] = ()) -> str:
    """Returns the cases' output with kernels of a level. ``tools``, ``emulator``: None and () for this machine."""
    own = tools or build.toolchain()
    products = [PRODUCTS, *((SOURCES / "kind.cpp", (f"-DFORETOKEN_KIND={kind:d}",)) for kind in KINDS)]
    libraries = (
        build.linked("pool", [(build.SHARED / "pool.cpp", ())], build.ANY, tools=tools),
        build.linked("cases", [(HERE.parent / "core" / "pool_cases.cpp", ())], build.ANY, tools=tools),
        build.linked("packing", [(SOURCES / "packing.cpp", ())], level, tools=tools),
        build.linked("products", products, level, tools=tools),
        build.linked("decoder", decoder_sources(KINDS, CACHES), level, tools=tools),
        build.linked("sampling", [(build.SHARED / "sampling.cpp", ())], level, tools=tools),
    )
    program = compiled(own, libraries[0].parent)
    done = subprocess.run([*emulator, str(program), *map(str, libraries)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
