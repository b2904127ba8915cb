"""Cost of a start: seconds to load and to the first token, and memory, with packed weights made anew and from disk.

    python benchmarks/loading.py --model llama-3b-q4_0.gguf --draft-model DRAFT
    python benchmarks/loading.py --model smollm2 --tokens 1500     # and the memory of a text

Every start is a fresh process. The first one of a pair packs the weights and keeps them in a cache folder of this run's
own, the second maps them. "Cold" means that the system's page cache was emptied before, for which the benchmark has to
run as root; reading the file alone is timed beside each.

A virtual machine may have to ask its host for each page of memory that it has not used lately, which takes longer than
packing. With ``--touch`` as much memory is filled just before the load, and timed alone.

Memory is that of the process less what it had after its imports: the highest while the target was loaded, what is left
afterwards, and the highest by the end of the text. "Engine" builds models, tokenizer and warm-up from loaded files.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from foretoken.bench.measure import fresh_process
from foretoken.bench.output import listing, report
from foretoken.core.files import cache_folder
from options import MODEL_HELP, Output, model_path

DROP = Path("/proc/sys/vm/drop_caches")
_MIB = 2**20
Start = dict[str, Any]  # seconds and bytes of one start
_PROGRAM = """
import ctypes, json, sys, time
from concurrent.futures import ThreadPoolExecutor
clock = time.perf_counter
started = clock()
from foretoken import LLM, SamplingParams
from foretoken.bench.output import memory
from foretoken.models.loading import load_model
from foretoken.models.runners.native import cache
from foretoken.models.runners.native.build import packing_library
import torch

def touch(size):
    library, threads, begun = packing_library(), torch.get_num_threads(), clock()
    def fill(_):
        address = library.foretoken_allocate(size // threads)
        ctypes.memset(address, 1, size // threads)
        return address
    with ThreadPoolExecutor(threads) as pool:
        filled = list(pool.map(fill, range(threads)))
    seconds = clock() - begun
    for address in filled:
        library.foretoken_free(address, size // threads)
    return seconds

touched = touch(int(sys.argv[3])) if sys.argv[3] != "0" else 0.0
began, before = clock(), memory("VmRSS")
model = load_model(sys.argv[1], weight_format="auto")  # as LLM loads it, so that both map the same file
loaded, peak, after = clock(), memory("VmHWM"), memory("VmRSS")
cache.wait()  # writes what was packed, while it is there
del model
again = clock()
llm = LLM(sys.argv[1], sys.argv[2] or None)
built = clock()
pieces = iter(llm.stream("def", SamplingParams(max_tokens=int(sys.argv[4]), temperature=0, ignore_eos=True)))
next(pieces)
first = clock()
for _ in pieces:
    pass
print(json.dumps({"imports": began - touched - started, "touch": touched, "load": loaded - began, "peak": peak - before,
                  "after": after - before, "engine": built - again, "first": first - built,
                  "text_peak": memory("VmHWM") - before}))
"""


COLUMNS = {
    "start": "{name}",
    "read the file": "{read:.2f} s",
    "imports": "{imports:.2f} s",
    "touch memory": "{touch:.2f} s",
    "load": "{load:.2f} s",
    "load / read": "{over_read:.2f}",
    "engine": "{engine:.2f} s",
    "first token": "{first:.2f} s",
    "peak / file": "{over_file:.2f}",
    "resident after, less file": "{beyond:+.0f} MiB",
}


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    draft_model: Annotated[str, typer.Option(help="Draft model of the engine; empty for none.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each kind.")] = 3,
    cold: Annotated[bool, typer.Option(help="Cold starts too, which empty the system's page cache.")] = True,
    touch: Annotated[bool, typer.Option("--touch", help="Fill as much memory before each load.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text.")] = 1,
    output: Output = None,
) -> None:
    """Start a model several times and print what it took."""
    path = model_path(model)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    arguments, starts = [str(path), draft_model, str(size * touch), str(tokens)], list[Start]()
    for emptied in [False, *([True] if cold and os.access(DROP, os.W_OK) else [])]:
        runs: dict[str, list[Start]] = {"packed": [], "mapped": []}
        for _ in range(repeats):
            with own_cache() as environment:
                for name, found in runs.items():
                    found.append(start(name, arguments, files, emptied, environment))
        starts += [_medians(found, size) for found in runs.values()]
    said = [
        f"{each['name']}: a text of {tokens} tokens, {each['text_beyond']:+.0f} MiB over the file" for each in starts
    ]
    facts = {"model": path.name, "megabytes": round(size / 1e6)}
    report([listing(COLUMNS, starts), *said], facts, output, bytes=size, starts=starts)


def start(name: str, arguments: list[str], files: list[Path], cold: bool, environment: dict[str, str]) -> Start:
    """Reads the files, then starts a fresh process that loads the model. arguments: those of the program."""
    empty: Callable[[], None] = _drop if cold else lambda: None
    empty()
    read = _read(files)
    empty()
    _, result = fresh_process(_PROGRAM, arguments, environment)
    return {"name": f"{'cold' if cold else 'warm'}, {name}", "read": read, **result}


@contextmanager
def own_cache() -> Iterator[dict[str, str]]:
    """Yields an environment with another cache folder, which shares the usual one's compiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        (cache_folder() / "native").mkdir(parents=True, exist_ok=True)
        Path(folder, "native").symlink_to(cache_folder() / "native", target_is_directory=True)
        yield {**os.environ, "FORETOKEN_CACHE": folder}


def _read(files: list[Path]) -> float:
    buffer, started = bytearray(8 * _MIB), time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as content:
            while content.readinto(buffer):
                pass
    return time.perf_counter() - started


def _drop() -> None:
    """Empties the page cache."""
    os.sync()
    with suppress(OSError):
        DROP.write_text("3", encoding="ascii")


def _medians(starts: list[Start], size: int) -> Start:
    """Returns the medians of equal starts, with their ratios to the file."""
    result = {"name": starts[0]["name"]}
    result |= {key: median(each[key] for each in starts) for key in starts[0] if key != "name"}
    beyond = {"beyond": (result["after"] - size) / _MIB, "text_beyond": (result["text_peak"] - size) / _MIB}
    return result | beyond | {"over_read": result["load"] / result["read"], "over_file": result["peak"] / size}


if __name__ == "__main__":
    typer.run(main)
