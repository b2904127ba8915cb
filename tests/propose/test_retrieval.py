"""A datastore on disk, and drafts out of it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from foretoken.core.context import Context
from foretoken.core.draft import PointMass
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.propose.base import BuildContext, Proposer
from foretoken.propose.retrieval import (
    MANIFEST,
    METHOD,
    Datastore,
    DatastoreWriter,
    Retrieval,
    RetrievalConfig,
    fingerprint,
)


class Vocabulary:
    """A tokenizer as far as a datastore looks at it."""

    def __init__(self, size: int = 100, prefix: str = "t") -> None:
        self.size, self.prefix = size, prefix

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.prefix}{i}": i for i in range(self.size)}


def write(folder: Path, documents: list[list[int]], tokenizer=None, shard_tokens: int = 1 << 24) -> Path:
    folder.mkdir()
    writer = DatastoreWriter(folder, tokenizer or Vocabulary(), shard_tokens)
    for document in documents:
        writer.add(document)
    writer.close()
    return folder


def context(tokens: list[int], identifier: int = 0) -> Context:
    return Context(identifier, tokens, len(tokens), SamplingLaw(), Streams(0))


DOCUMENTS = [[1, 2, 3, 4, 5, 6], [9, 2, 3, 7, 8], [2, 3, 7, 7, 7]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "store", DOCUMENTS)


def propose(store: Path, tokens: list[int], budget: int, **options):
    return Retrieval(Datastore.open(store, Vocabulary()), RetrievalConfig(**options)).propose(
        [context(tokens)], [budget]
    )[0]


def test_the_longest_context_decides_first(store):
    assert propose(store, [1, 2, 3], 3, top_k=1, base=1e6).ids == (4, 5, 6)
    assert propose(store, [9, 2, 3], 3, top_k=1, base=1e6).ids == (7, 8)


def test_counts_decide_between_equal_contexts(store):
    draft = propose(store, [30, 2, 3], 4)
    assert isinstance(draft.law, PointMass)
    assert draft.ids[0] == 7
    assert {draft.ids[node] for node in draft.children[0]} == {7, 4}
    assert math.exp(draft.scores[0]) == pytest.approx(2 / 3)


def test_shorter_contexts_fill_the_remaining_budget(store):
    draft = propose(store, [1, 2, 3], 16)
    assert draft.ids[:3] == (4, 5, 6)
    assert 7 in {draft.ids[node] for node in draft.children[0]}


def test_the_sequences_own_text_counts(store):
    assert propose(store, [40, 41, 42, 43, 40, 41], 2, top_k=1).ids == (42, 43)


def test_texts_without_a_match_are_not_drafted(store):
    assert propose(store, [77], 4).ids == ()
    assert propose(store, [], 4).ids == ()
    assert propose(store, [1, 2, 3], 0).ids == ()


def test_shards_act_as_one_datastore(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 30, 50).tolist() for _ in range(40)]
    whole = write(tmp_path / "whole", documents)
    parts = write(tmp_path / "parts", documents, shard_tokens=200)
    assert len(json.loads((parts / MANIFEST).read_text())["shards"]) > 5
    for document in documents[::7]:
        one, other = (propose(store, document[:30], 8, top_k=1, base=1e6).ids for store in (whole, parts))
        assert one == other == tuple(document[30:38])


def test_a_document_larger_than_a_shard_is_split(tmp_path):
    store = write(tmp_path / "store", [list(range(90))], shard_tokens=32)
    assert propose(store, [40, 41, 42], 4, top_k=1).ids == (43, 44, 45, 46)


def test_an_empty_datastore_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="would be empty"):
        write(tmp_path / "store", [[], []])


def test_another_tokenizer_is_refused(store):
    for other in (Vocabulary(101), Vocabulary(100, "u")):
        with pytest.raises(InvalidRequest, match="another tokenizer"):
            Datastore.open(store, other)
    assert fingerprint(Vocabulary()) == fingerprint(Vocabulary())


@pytest.mark.parametrize("name", ["text-00000.bin", "order-00000.bin"])
@pytest.mark.parametrize("harm", ["shorter", "empty", "missing"])
def test_a_broken_file_is_named(store, name, harm):
    file = store / name
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if harm == "shorter" else b"")
    with pytest.raises(ModelLoadError, match=f"{name}.*foretoken build-datastore"):
        Datastore.open(store, Vocabulary())


DEEP = "[" * 100_000
BAD_SHARD = json.dumps(
    {"format": "foretoken-datastore-1", "tokenizer": "y", "tokens": 1, "shards": [{"tokens": "x", "width": -1}]}
)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"format": "x", "shards": [1], "tokenizer": "y", "tokens": 1}', DEEP, BAD_SHARD]
)
def test_a_broken_manifest_is_named(store, text):
    (store / MANIFEST).write_text(text)
    with pytest.raises(ModelLoadError, match=MANIFEST):
        Datastore.open(store, Vocabulary())


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="is no datastore"):
        Datastore.open(tmp_path, Vocabulary())


def test_the_method_needs_a_datastore():
    workshop = BuildContext(None, Vocabulary(), None, None, lambda path: None, lambda config: Proposer())  # type: ignore
    with pytest.raises(InvalidRequest, match="build-datastore"):
        METHOD.build(RetrievalConfig(), workshop)


@pytest.mark.parametrize("options", [{"num_steps": 0}, {"num_steps": 65}, {"top_k": 0}, {"base": 0.5}])
def test_bad_keys_are_named(options):
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        RetrievalConfig(**options)
