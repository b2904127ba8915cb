"""GGUF models in several files, as llama-gguf-split writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from gguf.constants import GGMLQuantizationType as K

from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.checkpoint import resolve
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.weights import GGUFWeights
from foretoken.models.loading import load_model

from .gguf_files import add_weights, tiny_checkpoint, write_both
from .tiny import only_runner

FIRST = "model-00001-of-00003.gguf"


def write_split(folder: Path, name: str = "model") -> Path:
    """Writes a model in three files. Returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 2 * 11 + 3
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "qwen3", split_max_tensors=count // 3 + 1)
    add_weights(writer, tiny_checkpoint("qwen3"), "qwen3", K.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, *_ = parts = sorted(folder.glob(f"{name}-*.gguf"))
    assert len(parts) == 3
    return first


def test_the_first_file_and_the_folder_stand_for_all(tmp_path: Path) -> None:
    whole, _ = write_both(tiny_checkpoint("qwen3"), "qwen3", tmp_path, K.Q4_0)
    first = write_split(tmp_path / "split")
    assert resolve(tmp_path / "split") == first
    assert resolve(tmp_path / "split", FIRST) == first
    assert len({tensor.path for tensor in Header.read(first).tensors.values()}) == 3
    assert GGUFWeights(first).files == tuple(sorted(first.parent.glob("*.gguf")))
    scores = []
    with only_runner("torch"):
        for name in (whole, first, tmp_path / "split"):
            model = load_model(name, "float32")
            scores.append(model.score([model.open([3, 4, 5])], [Draft.empty()])[0].logits)
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("name", ["model-Q4_0", "Q4_0/model-Q4_0"])
def test_a_tag_of_the_hub_downloads_all_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / Path(name).parent
    first = write_split(folder, Path(name).name)
    write_split(tmp_path, "model-Q8_0")
    asked: list[str] = []

    def snapshot_download(hub_id: str, allow_patterns: list[str]) -> str:
        names = [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.gguf")]
        asked[:] = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name:Q4_0") == first
    assert len(asked) == 3 and all("Q4_0" in file for file in asked)
    assert resolve("org/name", first.relative_to(tmp_path).as_posix()) == first
    assert len(asked) == 3


def change(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def test_parts_that_are_missing_or_of_another_model_are_refused(tmp_path: Path) -> None:
    first = write_split(tmp_path / "a")
    second = first.with_name("model-00002-of-00003.gguf")
    with pytest.raises(ModelLoadError, match=f"not the first of the 3 parts.*{FIRST}"):
        Header.read(second)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"00002-of-00003\.gguf is not beside it"):
        Header.read(first)
    second.write_bytes(first.with_name("model-00003-of-00003.gguf").read_bytes())
    with pytest.raises(ModelLoadError, match="it is not part 2"):
        Header.read(first)
    second.write_bytes(content[:-40])
    with pytest.raises(ModelLoadError, match="damaged or truncated"):
        Header.read(first)
    second.write_bytes(content)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(ModelLoadError, match="one of 3 parts; expected a name like"):
        Header.read(renamed)
    change(first, b"blk.0.attn_q.weight", b"blk.0.attn_Q.weight")
    Header.read(first)  # the name is unknown, but no part has it twice


def test_wrong_counts_are_refused(tmp_path: Path) -> None:
    def write(count: Any, total: int) -> Path:
        file = tmp_path / FIRST
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    with pytest.raises(ModelLoadError, match=r"split\.count is 60000"):
        Header.read(write(60000, 0))
    first = write_split(tmp_path / "b")
    total = len(Header.read(first).tensors)
    change(
        first,
        b"split.tensors.count\x05\x00\x00\x00" + total.to_bytes(4, "little"),
        b"split.tensors.count\x05\x00\x00\x00\x01\x00\x00\x00",
    )
    with pytest.raises(ModelLoadError, match=f"have {total} tensors, and it claims 1"):
        Header.read(first)
