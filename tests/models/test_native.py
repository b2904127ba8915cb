"""The compiled kernels: all instruction sets of this machine against float64, and the fallbacks without them."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.core.native import build, cpu
from foretoken.core.native.build import KernelsUnavailable
from foretoken.core.native.toolchain import _zig
from foretoken.models.base import Handle
from foretoken.models.decoder import Decoder
from foretoken.models.loading import load_model
from foretoken.models.runners.native.build import Kind, decoder_sources, library, loaded_library, packing_library
from foretoken.models.runners.native.packing import Arena, pack
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.torch_runner import TorchRunner

from .tiny import ARCHITECTURES
from .trees import repeating

CLANG = (found,) if (found := shutil.which("clang++")) else _zig()
VOCAB = 131  # no multiple of anything
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "num_hidden_layers": 2,
    "intermediate_size": 88,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def available(kind: Kind = Kind.BFLOAT16) -> bool:
    try:
        library([kind], kind)
    except KernelsUnavailable:
        return False
    return True


needs_kernels = pytest.mark.skipif(not available(), reason="no compiler, or no AVX-512")


kinds = pytest.mark.parametrize(
    "dtype, quantization",
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "int4"),
        (torch.float32, "int4-g128"),
    ],
)


# The kernels of other levels than this processor's best are compiled for these tests only.
LEVELS = [
    pytest.param(level.name, marks=[] if level in cpu.available()[:1] else [pytest.mark.slow]) for level in cpu.LEVELS
]


@pytest.fixture(params=LEVELS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction-set level, of which this processor may run some."""
    name: str = request.param
    if name not in [level.name for level in cpu.available()]:
        pytest.skip(f"this processor cannot run {name}")
    monkeypatch.setenv(cpu.VARIABLE, name)
    return name


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": random(VOCAB, 72) * 5, "model.norm.weight": 1 + random(72)}
    for i in range(2):
        at = f"model.layers.{i}"
        shapes = {
            "self_attn.q_proj": (288, 72),
            "self_attn.k_proj": (96, 72),
            "self_attn.v_proj": (96, 72),
            "self_attn.o_proj": (72, 288),
            "mlp.gate_proj": (88, 72),
            "mlp.up_proj": (88, 72),
            "mlp.down_proj": (72, 88),
        }
        tensors |= {f"{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        norms = {"input_layernorm": 72, "post_attention_layernorm": 72, "self_attn.q_norm": 48, "self_attn.k_norm": 48}
        tensors |= {f"{at}.{name}.weight": 1 + random(size) for name, size in norms.items()}
    return tensors


def decoder(dtype: torch.dtype, quantization: str | None = None) -> Decoder:
    return Decoder(CONFIG, weights(), dtype, torch.device("cpu"), quantization=quantization)


def scores(model: Decoder) -> torch.Tensor:
    """A prompt, then a tree."""
    handle = model.open(list(range(3, 90)))
    draft = repeating((-1, 0, -1, 2, 1))
    return model.score([handle], [draft])[0].logits.float()


def score_again(model: Decoder, handle: Handle, drafted: list[int]) -> torch.Tensor:
    """A pass over the newest token and a chain behind it, abandoned afterwards."""
    logits = model.score([handle], [Draft.chain(drafted) if drafted else Draft.empty()])[0].logits.clone()
    model.commit([handle], [()])
    return logits


@needs_kernels
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-4), (torch.bfloat16, 0.4)])
def test_every_instruction_set_agrees_with_the_torch_runner(instructions, dtype, near, monkeypatch):
    compiled = decoder(dtype)
    assert isinstance(compiled.runner, NativeRunner)
    monkeypatch.setenv(build.SWITCH, "0")
    reference = decoder(torch.float32)
    assert isinstance(reference.runner, TorchRunner)
    assert (scores(compiled) - scores(reference)).abs().max() < near


@needs_kernels
@kinds
def test_every_instruction_set_has_independent_rows(instructions, dtype, quantization):
    model = decoder(dtype, quantization)
    assert model.batch_invariant
    prompt, continuation = list(range(3, 50)), list(range(60, 100))
    plain, handle = [], model.open(prompt)
    for token in continuation:
        plain.append(model.score([handle], [Draft.empty()])[0].logits[0])
        model.commit([handle], [[token]])
    for depth in (1, 3, 5, 14, 15, 16, 17, 31, 33, 39):
        other, handle = model.open(list(range(100))), model.open(prompt)
        got = model.score([other, handle], [Draft.chain([1, 2, 3]), Draft.chain(continuation[:depth])])[1].logits
        for row in range(depth + 1):
            assert torch.equal(got[row], plain[row]), (depth, row)


@needs_kernels
@kinds
def test_every_number_of_rows_gives_the_same_bits(instructions, dtype, quantization):
    """Passes of 1 to 34 rows: one, two and more register tiles of every height, without a prompt's rows beside."""
    model, continuation = decoder(dtype, quantization), list(range(60, 93))
    handle = model.open(list(range(3, 50)))
    score_again(model, handle, [])
    whole = score_again(model, handle, continuation)
    for depth in range(len(continuation)):
        assert torch.equal(score_again(model, handle, continuation[:depth]), whole[: depth + 1]), depth


@needs_kernels
@pytest.mark.slow
def test_threads_that_come_late_change_no_bit(tmp_path: Path) -> None:
    """Threads prepare few rows for themselves; with more threads than cores they find the work of others half done.

    MLPs of 48 numbers need padding, which is cleared in a loop of its own. Where that loop came between the rows and
    their product, 613 of 615 runs found it within 10,000 passes, half of them within 50.
    """
    torch.set_num_threads(4)
    model = load_model(ARCHITECTURES["qwen3"].save(tmp_path), "bfloat16", "cpu", "native")
    handle, draft = model.open([5]), Draft.chain([7, 9, 11])
    (first,) = model.score([handle], [draft])
    for _ in range(12_000):
        model.commit([handle], [()])
        assert torch.equal(model.score([handle], [draft])[0].logits, first.logits)


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_rows_without_logits_leave_before_the_last_layers_attention(instructions, quantization):
    """Rows without logits leave the last layer unless its states are tapped: the bits are the same either way."""
    model, draft = decoder(torch.bfloat16, quantization), repeating((-1, 0, -1, 1))
    drafts = [draft, Draft.empty(), Draft.chain([9, 9])]

    def run(taps: tuple[int, ...]) -> list[torch.Tensor]:
        handles = [model.open(list(range(3, 3 + length))) for length in (40, 1, 99)]
        first = [score.logits for score in model.score(handles, drafts, taps)]
        model.commit(handles, [[6, 7], [4], [9]])
        return first + [score.logits for score in model.score(handles, [Draft.empty()] * 3, taps)]

    for leaving, staying in zip(run(()), run((2,)), strict=True):
        assert torch.equal(leaving, staying)


@needs_kernels
def test_int8_is_near_float32(instructions: str) -> None:
    assert (scores(decoder(torch.bfloat16, "int8")) - scores(decoder(torch.float32))).abs().max() < 1.5


@needs_kernels
def test_int8_bits_are_the_same_on_tiles_and_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of integers know no rounding; heads of 48 keep this model's bf16 attention on vectors in both."""
    if "amx" not in [level.name for level in cpu.available()]:
        pytest.skip("no tiles here")
    tiles = scores(decoder(torch.bfloat16, "int8"))
    monkeypatch.setenv(cpu.VARIABLE, "avx512-bf16")
    assert torch.equal(scores(decoder(torch.bfloat16, "int8")), tiles)


@needs_kernels
@pytest.mark.parametrize("shapes, interleave", [([(40, 24)], False), ([(24, 10), (24, 10)], True), ([(16, 7)], False)])
def test_packing_loses_nothing(shapes: list[tuple[int, int]], interleave: bool) -> None:
    arena = Arena(packing_library())
    parts = [torch.randn(shape) for shape in shapes]
    matrix = pack(arena, parts, interleave=interleave).matrix
    count = matrix.units * 32 * matrix.steps
    flat = torch.frombuffer(bytearray(ctypes.string_at(matrix.data, count * 4)), dtype=torch.float32)
    blocks = flat.view(-1, matrix.steps, 16).transpose(1, 2)  # [blocks, 16, steps]
    for number, part in enumerate(parts):
        own = blocks[number :: len(parts)] if interleave else blocks
        rows = own.reshape(-1, matrix.steps)
        assert torch.equal(rows[: part.shape[0], : part.shape[1]], part)
        assert not rows[: part.shape[0], part.shape[1] :].any()


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, quantization", [(torch.float32, None), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")]
)
def test_avx2_and_avx512_give_the_same_bits(dtype, quantization, monkeypatch):
    """Both have fused multiply-adds and take the same order; bfloat16 instructions round differently."""
    results = []
    for name in ("avx512-vnni", "avx2"):
        if name not in [level.name for level in cpu.available()]:
            pytest.skip(f"this processor cannot run {name}")
        monkeypatch.setenv(cpu.VARIABLE, name)
        results.append(scores(decoder(dtype, quantization)))
    assert torch.equal(*results)


@needs_kernels
def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("foretoken.core.native.toolchain._zig", lambda: None)
    loaded_library.cache_clear()
    with pytest.raises(KernelsUnavailable, match=r"no C\+\+ compiler"):
        library([Kind.BFLOAT16], Kind.BFLOAT16)
    assert isinstance(decoder(torch.bfloat16).runner, TorchRunner)


@pytest.mark.slow
@pytest.mark.skipif(CLANG is None, reason="neither Clang nor Zig is installed")
def test_clang_compiles_the_kernels(tmp_path: Path) -> None:
    """Zig is Clang: it compiles wheels, and kernels on machines without a compiler."""
    assert CLANG is not None
    sources = [*decoder_sources([Kind.BFLOAT16], [Kind.BFLOAT16]), (build.SHARED / "sampling.cpp", ())]
    for source, flags in sources:
        command = [*CLANG, "-std=c++17", "-fPIC", "-w", *flags, f"-I{build.SHARED}", "-c", str(source), "-o"]
        done = subprocess.run([*command, str(tmp_path / "object.o")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@needs_kernels
def test_a_compiler_that_fails_is_named_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(KernelsUnavailable, match="does not compile"):
        library([Kind.BFLOAT16], Kind.BFLOAT16)
    assert not list((tmp_path / "native").iterdir())
