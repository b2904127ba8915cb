"""Runs the tests of Triton's kernels: on the device where there is one, else by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foretoken.models.runners.triton_kernels import recurrent_kernels

pytestmark = pytest.mark.slow


def test_kernels_equal_torch() -> None:
    """The interpreter is chosen when Triton is imported, so it has a process of its own."""
    pytest.importorskip("triton", reason="Triton is on Linux alone")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    file = Path(__file__).with_name("cuda_kernels.py")
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-n", "0", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env={**os.environ, **interpreted}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]


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
    source = triton.compiler.ASTSource(
        kernels._recur,
        signature | {"layer": "i32"},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 1, "enable_fp_fusion": True}).asm["ttgir"]
    (loop,) = (line for line in compiled.splitlines() if "scf.for" in line)
    assert loop.count(f"x{keys}xf32") == 1 and compiled.count('"tt.reduce"') == sums
