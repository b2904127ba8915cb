"""Runs the tests of Triton's kernels: on the device where there is one, else by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.models.runners.triton_kernels import attention_kernels, recurrent_kernels, sampling_kernels

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", ["verdicts", "not verdicts"])
def test_kernels_equal_torch(part: str) -> None:
    """The interpreter is chosen when Triton is imported, so it has a process of its own."""
    pytest.importorskip("triton", reason="Triton is on Linux alone")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    file = Path(__file__).with_name("cuda_kernels.py")
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-n", "0", "-p", "no:cacheprovider", "-k", part]
    run = subprocess.run(command, env={**os.environ, **interpreted}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]


def compiled_for_a_gpu(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], attributes: dict[Any, Any], **options: Any
) -> Any:
    """Returns the texts of a kernel by the stages of Triton's compiler, NVIDIA's assembler included."""
    import triton

    names = kernel.arg_names
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    return triton.compile(source, target=target, options=options).asm


INTEGERS = ("addresses", "sources", "noise", "top_k", "places", "winners", "best", "tokens", "ids", "last")
INTEGERS += ("drawn_from", "drafted", "firsts", "values", "nodes", "strides", "positions", "counts", "ends", "prefixes")
INTEGERS += ("paths", "children", "depths", "of_children")
DOUBLES = ("mass", "masses", "totals", "plain", "weights", "ratios", "chances", "rests", "of_trees", "excesses")
DOUBLES += ("of_drafts", "all_reached")
OF_TOKENS = (
    "_gather",
    "_look",
    "_keep",
    "_distribute",
    "_narrow",
    "_ratio",
    "_weigh",
    "_sum_excess",
    "_reject",
    "_draw",
    "_pick",
    "_total",
    "_nodes",
)


@pytest.mark.parametrize("name", [*OF_TOKENS, "_read_nodes", "_read_states", "_write_states"])
def test_kernels_of_tokens_compile(name: str) -> None:
    """The interpreter does not see types: variables of branches and loops keep theirs on a GPU."""
    triton = pytest.importorskip("triton", reason="Triton is on Linux alone")
    from foretoken.models.runners.triton_kernels import distributions

    modules = sampling_kernels() if name in OF_TOKENS else attention_kernels(), distributions
    kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
    sizes = {"CHUNKS": 5, "WIDE": 8, "SIZE": 5000, "LENGTH": 1024, "PARTS": 5, "COUNT": 4, "TREES": True}
    sizes |= {"RANKS": 4, "SAMPLED": True, "WIDTH": 4096, "BLOCK": 1024, "TYPE": triton.language.bfloat16}
    constants = {key: value for key, value in sizes.items() if key in kernel.arg_names}
    kinds = dict.fromkeys(INTEGERS, "*i64") | dict.fromkeys(DOUBLES, "*fp64") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("start", "depth", "rank", "path_stride"), "i32") | (
        {"result": "*i64"} if name == "_read_nodes" else {"recursive": "*i1"}
    )
    signature = {key: kinds.get(key, "*fp32") for key in kernel.arg_names}
    ptx = compiled_for_a_gpu(kernel, signature, constants, {}, num_warps=4, enable_fp_fusion=False)["ptx"]
    assert ptx.count("fma.rn.f32") % 8 == 0, "more is fused than in the CPU's exponential"


@pytest.mark.parametrize("mixer, sums", [("delta", 2), ("mamba", 1)])
@pytest.mark.parametrize("key_dim, value_dim", [(128, 128), (256, 64), (64, 64), (96, 80), (16, 32)])
def test_a_state_has_one_layout(mixer: str, sums: int, key_dim: int, value_dim: int) -> None:
    """A compiler that holds a state twice, in two layouts, adds up its numbers in two orders: bits would differ."""
    triton = pytest.importorskip("triton", reason="Triton is on Linux alone")
    kernels = recurrent_kernels()
    keys = triton.next_power_of_2(key_dim)
    constants = {
        "TAPS": 4,
        "CHANNELS": 2 * 2 * key_dim + 4 * value_dim,
        "KEY_HEADS": 2,
        "VALUE_HEADS": 4,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "DELTA": mixer == "delta",
        "SKIP": mixer == "mamba",
        "BLOCK_KEYS": keys,
        "BLOCK_VALUES": min(triton.next_power_of_2(value_dim), kernels.TILE // keys),
    }
    integers = ("firsts", "ends", "states", "sources", "targets", "saves", "inputs")
    names, attributes, signature = kernels._recur.arg_names, {}, {}
    for at, name in enumerate(names):
        signature[name] = "constexpr" if name in constants else "*i64" if name in integers else "*fp32"
        if name not in constants and name != "layer":
            attributes[(at,)] = [["tt.divisibility", 16]]
    signature["layer"], options = "i32", {"num_warps": 1, "enable_fp_fusion": True}
    compiled = compiled_for_a_gpu(kernels._recur, signature, constants, attributes, **options)["ttgir"]
    (loop,) = (line for line in compiled.splitlines() if "scf.for" in line)
    assert loop.count(f"x{keys}xf32") == 1 and compiled.count('"tt.reduce"') == sums
