"""Damaged and hostile GGUF files: a clear error each, no crash, and no memory beyond the file's size.

FORETOKEN_GGUF_MUTATIONS sets the number of mutated headers.
"""

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf.constants import GGMLQuantizationType as K

from foretoken import LLM, zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.checkpoint import load_generation_settings, load_tokenizer
from foretoken.models.formats.gguf.header import MAX_KEYS, MAX_TENSORS, Header
from foretoken.models.loading import load_model

from .gguf_files import add_weights, finish, tiny_checkpoint

COUNT = int(os.environ.get("FORETOKEN_GGUF_MUTATIONS", "300"))
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: bytes) -> bytes:
    return U64.pack(len(value)) + value


def header(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + U32.pack(version) + U64.pack(tensors) + U64.pack(keys)


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(U64.pack(size) for size in shape)
    return text(name) + U32.pack(len(shape)) + sizes + U32.pack(kind) + U64.pack(offset)


def array(kind: int, count: int) -> bytes:
    return text(b"key") + U32.pack(ARRAY) + U32.pack(kind) + U64.pack(count)


PAD = bytes(256)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "fewer than a header"),
    "short": (header()[:20], "fewer than a header"),
    "magic": (header(magic=b"GGML") + PAD, "not a GGUF file"),
    "version": (header(version=1) + PAD, "version 1"),
    "big-endian": (header(version=3 << 24) + PAD, "big-endian"),
    "many keys": (header(keys=MAX_KEYS + 1) + PAD, f"claims {MAX_KEYS + 1} keys"),
    "most keys": (header(keys=2**64 - 1) + PAD, f"claims {2**64 - 1} keys"),
    "many tensors": (header(tensors=MAX_TENSORS + 1) + PAD, "tensors; supported"),
    "fewer keys": (header(keys=3) + text(b"a") + U32.pack(UINT32) + U32.pack(1), "beyond the end of the file"),
    "long key": (header(keys=1) + U64.pack(2**63) + PAD, "a name of"),
    "long string": (header(keys=1) + text(b"key") + U32.pack(STRING) + U64.pack(2**62) + PAD, "beyond the end"),
    "not UTF-8": (header(keys=1) + text(b"\xff\xfe") + PAD, "not UTF-8"),
    "type of value": (header(keys=1) + text(b"key") + U32.pack(99) + PAD, "unknown type 99"),
    "long array": (header(keys=1) + array(UINT32, 2**62) + PAD, "beyond the end"),
    "long array of strings": (header(keys=1) + array(STRING, 2**61) + PAD, "beyond the end"),
    "array of arrays": (header(keys=1) + array(ARRAY, 1) + array(ARRAY, 1)[11:] + PAD, "array of arrays"),
    "a key twice": (header(keys=2) + 2 * (text(b"a") + U32.pack(UINT32) + U32.pack(1)) + PAD, "twice"),
    "alignment": (header(keys=1) + text(b"general.alignment") + U32.pack(UINT32) + U32.pack(3) + PAD, "power of two"),
    "dimensions": (header(1) + tensor(b"t", (1,) * 5, 0, 0) + PAD, "5 dimensions"),
    "no dimensions": (header(1) + tensor(b"t", (), 0, 0) + PAD, "0 dimensions"),
    "empty dimension": (header(1) + tensor(b"t", (4, 0), 0, 0) + PAD, "the shape"),
    "type of tensor": (header(1) + tensor(b"t", (4,), 999, 0) + PAD, "number 999"),
    "part of a block": (header(1) + tensor(b"t", (33,), int(K.Q4_0), 0) + PAD, "Q4_0 does not divide"),
    "huge tensor": (header(1) + tensor(b"t", (2**62, 2**62), 0, 0) + PAD, "beyond the file's"),
    "far offset": (header(1) + tensor(b"t", (4,), 0, 2**63) + PAD, "beyond the file's"),
    "odd offset": (header(1) + tensor(b"t", (4,), 0, 8) + PAD, "not aligned"),
    "overlapping": (header(2) + tensor(b"t", (16,), 0, 0) + tensor(b"u", (16,), 0, 32) + PAD, "lies on another"),
    "one name twice": (header(2) + tensor(b"t", (4,), 0, 0) + tensor(b"t", (4,), 0, 32) + PAD, "one name"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_refused_without_much_memory(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=message) as caught:
            Header.read(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert peak < 1_000_000


@pytest.mark.parametrize("name", BAD)
def test_the_cause_alone_is_reported(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(BAD[name][0])
    with pytest.raises(ModelLoadError) as expected:
        Header.read(file)
    for load in (load_tokenizer, load_model, load_generation_settings, LLM):
        with pytest.raises(ModelLoadError) as caught:
            load(file)
        assert str(caught.value) == str(expected.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file with a tokenizer, whose header is a few kilobytes."""
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    module = tiny_checkpoint("qwen2", num_hidden_layers=1)
    writer = gguf.GGUFWriter(file, "qwen2")
    add_weights(writer, module, "qwen2", K.Q4_K)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = [*sorted(load_tokenizer(zoo.path("target")).get_vocab())[:318], "aa", "<|end|>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 319 + [3])
    writer.add_token_merges([])
    writer.add_eos_token_id(319)
    finish(writer)
    return file.read_bytes()


def use(file: Path) -> None:
    """Loads all that a file holds and computes with it."""
    load_tokenizer(file).encode("def f(x): return x")
    load_generation_settings(file)
    model = load_model(file, dtype="float32", max_length=64)
    handle = model.open([3, 4, 5][: model.max_length])
    model.score([handle], [Draft.empty()])


def test_a_whole_file_is_used(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(whole)
    use(tmp_path / "model.gguf")


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused(share: float, whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelLoadError, match="truncated"):
        use(file)


def _bit(data: bytearray, generator: random.Random, end: int) -> None:
    data[generator.randrange(4, end)] ^= 1 << generator.randrange(8)


def _byte(data: bytearray, generator: random.Random, end: int) -> None:
    data[generator.randrange(4, end)] = generator.randrange(256)


def _count(data: bytearray, generator: random.Random, end: int) -> None:
    """Writes an extreme number somewhere."""
    number = generator.choice([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])
    coded = generator.choice([U64.pack(number), U32.pack(number % 2**32)])
    at = generator.randrange(4, end - 8)
    data[at : at + len(coded)] = coded


def _copy(data: bytearray, generator: random.Random, end: int) -> None:
    """Copies some bytes of the header over others."""
    size = generator.randrange(1, 64)
    source, target = (generator.randrange(4, end - size) for _ in range(2))
    data[target : target + size] = data[source : source + size]


def _value(data: bytearray, generator: random.Random, end: int) -> None:
    """Changes a number of the architecture's settings."""
    at = data.find(b"qwen2.", generator.randrange(4, end // 3))
    start = data.find(b"\x04\x00\x00\x00", at) + 4
    data[start : start + 4] = U32.pack(generator.choice([0, 1, 3, 255, 10_000, 2**20, 2**31, 2**32 - 1]))


MUTATIONS: tuple[Callable[[bytearray, random.Random, int], None], ...] = (_bit, _byte, _count, _copy, _value)


def outcome(file: Path) -> str | None:
    """Returns the message that a file is refused with; None if it is used."""
    try:
        use(file)
    except ModelLoadError as error:
        return str(error)
    return None


def test_mutated_headers_load_or_are_refused(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(whole)
    end = min(stored.start for stored in Header.read(tmp_path / "model.gguf").tensors.values())
    refused = 0
    for seed in range(COUNT):
        generator = random.Random(seed)
        data = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            generator.choice(MUTATIONS)(data, generator, end)
        file = tmp_path / f"{seed}.gguf"
        file.write_bytes(data)
        try:
            message = outcome(file)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        file.unlink()
        if message is not None:
            refused += 1
            assert 20 < len(message) < 1000 and "\n" not in message, seed
    assert refused > COUNT // 3
