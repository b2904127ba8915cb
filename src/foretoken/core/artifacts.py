"""Artifacts, the files and folders that commands write: their kinds, and the rule that protects them.

An output is never an input of its command, and never replaces an artifact of another kind; one of the same kind is
replaced only if the user asks for it.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.core.files import atomic_directory, atomic_file, restore_interrupted, write_errors

MODEL = "a model"
ACCEPTANCE_HEAD = "an acceptance head"
ADAPTER = "a LoRA adapter"
DATASTORE = "a datastore"
GGUF = "a GGUF file"
GGUF_FOLDER = "GGUF files"
TRAINING_TEXT = "text and hidden states of a training run"
DISTRIBUTIONS = "distributions of a training run"
CHECKPOINT = "the checkpoint of a training run"
JSON = "a JSON document"
JSON_LINES = "JSON lines"
HTML = "an HTML page"
TABLE = "a safetensors file"
OTHER_FILE = "something else"
OTHER_FOLDER = "files that are no checkpoint, head or datastore"

PROVENANCE = "provenance.json"
"""The file of an artifact that says how it was made."""

HEADS_FOLDER = "heads"
"""A target's folder may contain heads for it, each in ``heads/<role>``."""

ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
"""The type of the layers of an assistant, by the checkpoint's ``model_type``."""

_NO_ARTIFACT = (None, OTHER_FILE, OTHER_FOLDER)
_FILE_KINDS = (JSON, JSON_LINES, HTML, TABLE, GGUF, CHECKPOINT)
_ALONE = (JSON, JSON_LINES, HTML, TABLE)  # never a part of another artifact
# The first files of a folder that decide its kind, in this order.
_FOLDERS = {
    "adapter_config.json": ADAPTER,
    "datastore.json": DATASTORE,
    "windows.pt": TRAINING_TEXT,
    "logp.bin": DISTRIBUTIONS,
}
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_SUFFIXES = {".gguf": GGUF, ".checkpoint": CHECKPOINT}
_FILES = ((b"GGUF", GGUF), (b'{"', JSON_LINES), (b"{", JSON), (b"[", JSON), (b"<!doctype html", HTML))


def heads_of(method: str) -> str:
    return f"heads of the method {method.replace('-', '_')!r}"


def heads_method(config: Mapping[str, Any]) -> str | None:
    """Returns the method that drafts with the heads of a config.json; None if it is no configuration of heads."""
    kind, names = str(config.get("model_type")), " ".join(config.get("architectures") or []).lower()
    if "eagle" in names or "eagle" in kind:
        return "eagle3" if "eagle3" in names or config.get("draft_vocab_size") else "eagle"
    if config.get("speculators_model_type") in ("dflash", "dspark"):
        return str(config["speculators_model_type"])
    if "dspark" in names:
        return "dspark"
    if "dflash" in names:
        section = config.get("dflash_config")
        return "jetspec" if isinstance(section, dict) and section.get("causal_head") else "dflash"
    if kind in ASSISTANTS:
        return "assistant"
    if config.get("foretoken_mtp") is not None:
        return "mtp"
    if kind == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    if kind in ("foretoken_blockwise", "foretoken_early_exit"):
        return kind.removeprefix("foretoken_")
    return None


def kind_of(path: Path) -> str | None:
    """Returns the kind of the artifact at ``path``; None for a missing path, an empty file or folder, or a device."""
    try:
        if path.is_dir():
            return _folder_kind(path)
        return _file_kind(path) if path.is_file() else None
    except PermissionError:
        return OTHER_FOLDER if path.is_dir() else OTHER_FILE


def _folder_kind(folder: Path) -> str | None:
    names = {file.name for file in folder.iterdir() if ".partial-" not in file.name}
    if not names:
        return None
    if kind_by_name := next((kind for name, kind in _FOLDERS.items() if name in names), None):
        return kind_by_name
    if "config.json" in names:
        return _checkpoint_kind(folder, names)
    if any(folder.glob("model*.safetensors")):
        return MODEL
    return GGUF_FOLDER if any(name.lower().endswith(".gguf") for name in names) else OTHER_FOLDER


def _checkpoint_kind(folder: Path, names: set[str]) -> str:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = {}
    weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    if not isinstance(config, dict) or not (weights or config.get("model_type") or config.get("architectures")):
        return MODEL if weights else OTHER_FOLDER
    if config.get("model_type") == "foretoken_acceptance":
        return ACCEPTANCE_HEAD
    try:
        method = heads_method(config)
    except TypeError:  # fields of other types than theirs
        method = None
    if method == "mtp" and names.intersection(_TOKENIZERS):  # a model that ships its MTP layer
        method = None
    return MODEL if method is None else heads_of(method)


def _file_kind(file: Path) -> str | None:
    if kind_by_suffix := _SUFFIXES.get(file.suffix.lower()):
        return kind_by_suffix
    with file.open("rb") as opened:
        start = opened.read(64)
    if not start.strip():
        return None
    if start[8:10] == b'{"':  # after the size of the header
        return TABLE
    start = start.lstrip()
    return next((kind for mark, kind in _FILES if start.lower().startswith(mark.lower())), OTHER_FILE)


@dataclass(frozen=True)
class Destination:
    """A file or folder that a command writes."""

    path: Path  # its absolute path
    kind: str  # kind of the artifact
    force: bool = False  # whether an artifact of the same kind is replaced

    @classmethod
    def checked(cls, path: Path, kind: str, inputs: Iterable[Path | None] = (), force: bool = False) -> Self:
        """Returns a destination after checking that it may be written.

        Args:
            path: File or folder to write. Links are followed.
            kind: Kind of the artifact.
            inputs: Files and folders that the command uses otherwise; None for none.
            force: Whether to replace an artifact of the same kind.

        Raises:
            InvalidRequest: ``path`` is an input or contains one, exists, or cannot be written to.
            WriteError: It is below a file.
        """
        out = path.expanduser().absolute()
        if not out.resolve().name:
            raise InvalidRequest(f"{out} cannot be written to; name a folder that does not exist yet")
        restore_interrupted(out.resolve())
        for source in inputs:
            if source is not None:
                _check_input(out, source.expanduser().absolute(), "file" if kind in _FILE_KINDS else "folder")
        result = cls(out, kind, force)
        result.check(out)
        if kind in _ALONE and out.is_file() and kind_of(out.parent) not in (*_NO_ARTIFACT, GGUF_FOLDER):
            raise InvalidRequest(f"{out} belongs to {kind_of(out.parent)}; name another file")
        parent = next(p for p in out.resolve().parents if p.exists())
        if not parent.is_dir():
            raise WriteError(f"cannot write {out}: {parent} is a file; choose another folder")
        if not os.access(parent, os.W_OK):
            raise InvalidRequest(f"cannot write in {parent}; choose a folder you may write to")
        return result

    def check(self, existing: Path) -> None:
        """Raises InvalidRequest if the artifact ``existing``, which is at ``path`` or was, may not be replaced."""
        found = kind_of(existing)
        if found is None:
            if existing.exists() and existing.is_dir() == (self.kind in _FILE_KINDS):
                what = "folder" if existing.is_dir() else "file"
                raise InvalidRequest(f"{self.path} is a {what}, and {self.kind} is none; name another output")
            return
        if found != self.kind:
            raise InvalidRequest(f"{self.path} holds {found} and is not replaced by {self.kind}; name another output")
        if not self.force:
            raise InvalidRequest(f"{self.path} exists; name another output, or pass --force to replace it")

    def folder(self) -> AbstractContextManager[Path]:
        """Yields a temporary folder that becomes the artifact. See ``atomic_directory``."""
        return atomic_directory(self.path.resolve(), self.check)

    @contextmanager
    def file(self) -> Iterator[Path]:
        """Yields the path of a temporary file that becomes the artifact. Raises WriteError. See ``atomic_file``."""
        with write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.path.resolve(), self.check) as partial:
                yield partial


def _check_input(out: Path, source: Path, what: str) -> None:
    """Raises InvalidRequest if writing ``out`` would change or delete ``source``."""
    if _same(out, source):
        raise InvalidRequest(f"{out} is the same {what} as {source}, which this command uses; name another output")
    if any(_same(out, parent) for parent in source.resolve().parents):
        raise InvalidRequest(f"{out} contains {source}, which this command uses; name another output")
    inside = list(_below(out, source))
    if inside and source.is_dir() and not out.is_file() and inside[0] != HEADS_FOLDER:
        found = kind_of(source)
        if found not in _NO_ARTIFACT:
            raise InvalidRequest(f"{out} is inside {source}, {found} that this command uses; name another output")


def _below(path: Path, folder: Path) -> Iterator[str]:
    """Yields the names that lead from ``folder`` to ``path``; none if ``path`` is elsewhere."""
    real = path.resolve()
    for depth, parent in enumerate(real.parents, start=1):
        if _same(parent, folder):
            yield from real.parts[-depth:]
            return


def _same(path: Path, other: Path) -> bool:
    """Returns whether two paths name one file or folder, whatever links or letter case they go through."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return path.resolve() == other.resolve()
