"""Retrieval (REST, 2311.08252): drafts continuations of the same context in a datastore of text, as a tree.

A datastore is a folder of tokenized text, sorted once and memory-mapped. ``datastore.json`` describes it.
Each shard has ``text-N.bin`` and ``order-N.bin``, see ``SuffixArray``. Shards bound the memory of building,
whatever the total size.
"""

import hashlib
import json
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from foretoken.core.checks import integer, number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.schema import Schema, Size, parse, read_object
from foretoken.propose.base import BuildContext, Method
from foretoken.propose.matches import BREAK, LIMIT, PAD, GrowingText, Ids, Matches, TextProposer
from foretoken.propose.suffix_array import SuffixArray
from foretoken.propose.tree import candidate_tree

MANIFEST = "datastore.json"
FORMAT = "foretoken-datastore-1"
DEPTH = 32  # maximum length of a matched context; REST matches 16
SHARD_TOKENS = 1 << 24  # take about 700 MB while they are sorted
_HINT = "build it again with foretoken build-datastore"


def fingerprint(tokenizer: Any) -> str:
    """Returns a hash of the meaning of token ids: equal iff two tokenizers map ids to the same strings."""
    digest = hashlib.sha256()
    for token, identifier in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{identifier} {token!r}\n".encode())
    return digest.hexdigest()


class Shard(Schema):
    """One shard of a datastore: its number of tokens, and the bytes of each."""

    tokens: Size
    width: Annotated[int, Field(ge=1, le=8)]


class Manifest(Schema):
    """Contents of ``datastore.json``."""

    format: str
    tokenizer: Annotated[str, Field(min_length=1)]
    tokens: Annotated[int, Field(ge=1)]
    shards: Annotated[list[Shard], Field(min_length=1)]


class DatastoreWriter:
    """Fills ``folder`` with shards as documents are added; ``close`` writes the manifest.

    The caller creates the folder, and removes it if anything fails.
    """

    def __init__(self, folder: Path, tokenizer: Any, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.shard_tokens = folder, shard_tokens
        self.tokens = self.documents = self.nbytes = 0
        self._fingerprint = fingerprint(tokenizer)
        self._text = GrowingText()
        self._shards: list[dict[str, int]] = []

    def add(self, ids: Sequence[int]) -> None:
        """Adds one document. A document larger than a shard is split."""
        if not ids:
            return
        self.documents += 1
        self.tokens += len(ids)
        for start in range(0, len(ids), self.shard_tokens):
            self._text.extend([*ids[start : start + self.shard_tokens], BREAK])
            if len(self._text) >= self.shard_tokens:
                self._flush()

    def close(self) -> None:
        """Writes the manifest. Raises InvalidRequest if no token was added."""
        if len(self._text):
            self._flush()
        if not self._shards:
            raise InvalidRequest("the files hold no text, so the datastore would be empty; pass files with text")
        manifest = {
            "format": FORMAT,
            "tokenizer": self._fingerprint,
            "depth": DEPTH,
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": self._shards,
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        text = SuffixArray.build(self._text.tokens(), DEPTH)
        for name, data in zip(_names(len(self._shards)), text.files, strict=True):
            (self.folder / name).write_bytes(data)
            self.nbytes += len(data)
        self._shards.append({"tokens": len(text), "width": text.width})
        self._text = GrowingText()


class Datastore:
    """An opened datastore. tokens: Number of tokens of all documents."""

    def __init__(self, shards: Sequence[SuffixArray], tokens: int) -> None:
        self.shards, self.tokens = tuple(shards), tokens

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Any) -> "Datastore":
        """Maps the files without reading them.

        Raises:
            ModelLoadError: The folder is not a complete datastore.
            InvalidRequest: It was built with another tokenizer.
        """
        folder = Path(folder).expanduser()
        manifest = _manifest(folder)
        if manifest.tokenizer != fingerprint(tokenizer):
            raise InvalidRequest(
                f"the datastore {folder} was built with another tokenizer than this target's: its token ids mean "
                "other text; build one with foretoken build-datastore --model and this target"
            )
        shards = [_shard(folder, number, shard.tokens, shard.width) for number, shard in enumerate(manifest.shards)]
        return cls(shards, manifest.tokens)

    def find_matches(self, tail: Ids, steps: int, limit: int = LIMIT) -> Iterable[Matches]:
        """Returns the matches of each shard, see ``SearchableText.find_matches``."""
        return [shard.find_matches(tail[-DEPTH:], min(steps, PAD), limit) for shard in self.shards]


def _names(number: int) -> tuple[str, str]:
    return f"text-{number:05}.bin", f"order-{number:05}.bin"


def _manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.is_file():
        raise ModelLoadError(f"{folder} is no datastore: it has no {MANIFEST}; {_HINT}")
    try:
        manifest = parse(Manifest, read_object(file), str(file))
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}; {_HINT}") from None
    if manifest.format != FORMAT:
        raise ModelLoadError(f"{file} describes a datastore of format {manifest.format}, not {FORMAT}; {_HINT}")
    return manifest


def _shard(folder: Path, number: int, tokens: int, width: int) -> SuffixArray:
    text, order = (
        _map(folder / name, size)
        for name, size in zip(_names(number), ((tokens + PAD) * width, tokens * 4), strict=True)
    )
    return SuffixArray(text, np.frombuffer(order, "<i4").astype(np.int32, copy=False), width)


def _map(file: Path, expected: int) -> mmap.mmap:
    try:
        with file.open("rb") as handle:
            size = handle.seek(0, 2)
            if size != expected:
                raise ModelLoadError(f"{file} has {size} bytes and should have {expected}: it is not whole; {_HINT}")
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"cannot map {file}: {error}; {_HINT}") from error


@dataclass(frozen=True, slots=True)
class RetrievalConfig:
    """Size of the draft tree made of matches."""

    num_steps: int = 16  # maximum depth of the tree
    top_k: int = 8  # maximum number of children of a node; 1 drafts a chain
    # weight factor of a context that is one token longer; 1 counts all matches equally; a large number trusts only the
    # longest, as REST does
    base: float = 3.0

    def __post_init__(self) -> None:
        integer("num_steps", self.num_steps, 1, PAD)
        integer("top_k", self.top_k, 1)
        number("base", self.base, 1.0, 1e6)


class Retrieval(TextProposer):
    """Drafts the likeliest nodes of the trie of continuations, as fixed candidates.

    The sequence's own text is searched together with the datastore. Weights count occurrences, longer contexts more, so
    that shorter matches still fill the tree where the longest occurs only once.
    """

    name = "retrieval"

    def __init__(self, datastore: Datastore, config: RetrievalConfig | None = None) -> None:
        self.datastore, self.config = datastore, config or RetrievalConfig()
        super().__init__()

    def _draft(self, context: Context, budget: int) -> Draft:
        text, config = self._texts.of(context), self.config
        tail, steps = text.tail(DEPTH), min(budget, config.num_steps)
        own = text.find_matches(tail, steps)
        matches = Matches.best([own, *self.datastore.find_matches(tail, steps)], LIMIT)
        weights: dict[tuple[int, ...], float] = {}
        longest = max(matches.lengths, default=0)
        for length, row in zip(matches.lengths.tolist(), matches.following.tolist(), strict=True):
            continuation = tuple(row)
            weights[continuation] = weights.get(continuation, 0.0) + config.base ** float(length - longest)
        return candidate_tree(weights, budget, steps, config.top_k).draft()


def build(config: RetrievalConfig, build_context: BuildContext) -> Retrieval:
    if build_context.model is None:
        raise InvalidRequest(
            "method 'retrieval' needs a datastore: build one with foretoken build-datastore and name its folder as "
            "'model' in speculative_config"
        )
    return Retrieval(Datastore.open(build_context.model, build_context.tokenizer), config)


METHOD = Method(RetrievalConfig, build, tokens=16, drafts_trees=True)
