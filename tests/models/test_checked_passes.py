"""The boundary of the compiled kernels: a wrong argument is refused by name, and nothing is read or written."""

import ctypes
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.core.native.build import KernelsUnavailable, linked, require
from foretoken.core.native.status import KernelArgumentError, check_layout, load
from foretoken.models.base import Handle
from foretoken.models.chains import ChainRequest, DraftVocabulary
from foretoken.models.decoder import Decoder
from foretoken.models.loading import load_model
from foretoken.models.runners.native.arrays import replay_pointer
from foretoken.models.runners.native.bindings import BatchSpec, DecoderFunctions, Matrix, ModelSpec
from foretoken.models.runners.native.build import Kind, decoder_sources
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan

from . import dense
from .plain import text
from .tiny import ARCHITECTURES, VOCAB, only_runner

TREE = Draft.tree([5, 6, 7, 8], (-1, 0, 0, 1))
FIRST = 9  # rows of the first sequence; the second one has a row and a tree of four


def loaded(folder: Path, family: str = "llama") -> Decoder:
    module = dense.module(family[7:]) if family.startswith("dense: ") else ARCHITECTURES[family].build()
    module.save_pretrained(folder)
    with only_runner("compiled"):
        model = load_model(folder, "float32", "cpu", "native")
    assert isinstance(model, Decoder)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return loaded(tmp_path_factory.mktemp("llama"))


class OnePass:
    """The arguments of a pass over a prompt of ``FIRST`` tokens and a tree behind a text of 63, to be changed."""

    def __init__(self, model: Decoder) -> None:
        assert isinstance(model.runner, NativeRunner)
        self.model, self.runner = model, model.runner
        self.handles = [model.open(text(FIRST, 1)), model.open(text(63, 2))]
        model.score(self.handles[1:], [Draft.empty()])
        model.commit(self.handles[1:], [[3]])
        self.plan = PassPlan.of(self.handles, [Draft.empty(), TREE], [0, 0])
        self.batch, self.logits = self.runner._batch(self.plan), torch.zeros(len(self.plan.outputs), 128)
        self.batch.logits = self.logits.data_ptr()
        self.steps = self.runner._pages.plan(self.plan.parts)
        if self.steps is not None:
            self.batch.replay = replay_pointer(self.steps)

    def put(self, name: str, at: int, value: int) -> None:
        """Changes a number of an array."""
        ctypes.cast(getattr(self.batch, name), ctypes.POINTER(ctypes.c_int32))[at] = value

    def run(self) -> None:
        self.runner._library.foretoken_run(self.runner._spec, self.batch, self.runner._workspace, 2)

    def cache(self) -> bytes:
        """All pages of both sequences."""
        size, held = self.runner._pages.page_bytes, [self.runner._pages.held(handle.slot) for handle in self.handles]
        return b"".join(ctypes.string_at(address, size) for pages in held for address in pages)

    def close(self) -> None:
        for handle in self.handles:
            self.model.close(handle)


def refused(model: Decoder, change: Callable[[OnePass], object], message: str) -> None:
    one = OnePass(model)
    before = one.cache()
    change(one)
    with pytest.raises(KernelArgumentError, match=message):
        one.run()
    assert one.cache() == before and not one.logits.any()
    one.close()


# name of an array, place in it, the wrong number, and the message
WRONG = [
    ("tokens", 3, VOCAB, f"token {VOCAB} of row 3 is outside the vocabulary of {VOCAB} tokens"),
    ("tokens", 0, -1, "token -1 of row 0"),
    ("tokens", FIRST, 2**31 - 1, f"token {2**31 - 1} of row {FIRST}"),
    ("positions", 2, 2**30, f"row 2 is at position {2**30}, beyond the tables of 512 positions"),
    ("positions", 2, -1, "row 2 is at position -1"),
    ("places", 4, 64, "row 4 is written to cache row 64, and its sequence has 64"),
    ("places", 4, -1, "row 4 is written to cache row -1"),
    ("places", FIRST + 4, 128, f"row {FIRST + 4} is written to cache row 128"),
    ("prefix", 1, 65, "row 1 sees 65 keys, and its sequence has 64"),
    ("prefix", 1, -1, "row 1 sees -1 keys"),
    ("branches", 2, 128, "sees cache row 128"),
    ("branches", 2, -1, "sees cache row -1"),
    ("branch_from", 0, 1, "branch_from must lead from 0 to"),
    ("branch_from", FIRST + 2, 99, "branch_from descends from 99"),
    ("sequence_from", 0, 1, "sequence_from must lead from 0"),
    ("sequence_from", 2, 99, "sequence_from must lead from 0"),
    ("sequence_from", 1, 99, "sequence_from descends from 99"),
    ("outputs", 1, 0, "logits of row 0"),
    ("outputs", 0, -1, "logits of row -1"),
    ("outputs", 5, 99, "logits of row 99, of 14 rows"),
    ("page_counts", 1, 1, "row 10 is written to cache row 64, and its sequence has 64"),
]


@pytest.mark.parametrize(("name", "at", "value", "message"), WRONG)
def test_a_number_out_of_range_is_refused(name: str, at: int, value: int, message: str, llama: Decoder) -> None:
    refused(llama, lambda one: one.put(name, at, value), message)


@pytest.mark.parametrize("name", ["tokens", "positions", "places", "prefix", "branch_from", "pages", "page_counts"])
def test_a_missing_array_is_refused(name: str, llama: Decoder) -> None:
    refused(llama, lambda one: setattr(one.batch, name, None), "without|neither|must lead")


def test_the_right_pass_runs_and_a_check_alone_computes_nothing(llama: Decoder) -> None:
    one = OnePass(llama)
    one.runner._library.foretoken_check(one.runner._spec, one.batch, 2)
    assert not one.logits.any()
    one.run()
    expected = torch.cat([scores.logits for scores in llama.score(one.handles, [Draft.empty(), TREE])])
    assert torch.equal(one.logits[:, :VOCAB], expected)
    one.close()


def test_threads_hidden_states_and_adapters_are_checked(llama: Decoder) -> None:
    one = OnePass(llama)
    with pytest.raises(KernelArgumentError, match="0 threads"):
        one.runner._library.foretoken_run(one.runner._spec, one.batch, one.runner._workspace, 0)
    taps, layers = array("Q", [one.logits.data_ptr()]), array("i", [4])
    one.batch.taps, one.batch.tap_layers, one.batch.tap_count = taps.buffer_info()[0], layers.buffer_info()[0], 1
    with pytest.raises(KernelArgumentError, match="hidden states of layer 4, of 2 layers"):
        one.run()
    one.close()


def test_tables_of_positions_end(tmp_path: Path) -> None:
    def behind(count: int) -> Callable[[OnePass], object]:
        return lambda one: one.put("positions", 3, count)

    refused(loaded(tmp_path / "gpt2", "dense: gpt2"), behind(10**6), "beyond the .* learned positions")
    bloom = loaded(tmp_path / "bloom", "dense: bloom")

    def short(one: OnePass) -> None:
        one.runner._spec.bias_stride = 50

    refused(bloom, short, "beyond the table of 50 biases")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: steps.sources.__setitem__(0, 7), "reads state 7"),
        (lambda steps: steps.targets.__setitem__(0, -3), "writes state -3"),
        (lambda steps: steps.saves.__setitem__(0, 0), "snapshot 0"),
        (lambda steps: steps.inputs.__setitem__(0, FIRST), f"sequence 0 reads the inputs of row {FIRST}"),
        (lambda steps: steps.inputs.__setitem__(0, ~99), "sequence 0 reads the inputs of row -100"),
        (lambda steps: steps.moved_of.__setitem__(0, 2), "inputs of sequence 2 are kept, of 2"),
        (lambda steps: steps.first_step.__setitem__(1, 99), "first_step descends"),
    ],
)
def test_steps_of_recurrent_layers_are_checked(change: Any, message: str, hybrid: Decoder) -> None:
    refused(hybrid, lambda one: change(one.steps), message)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return loaded(tmp_path_factory.mktemp("hybrid"), "qwen3-next")


def test_chains_are_checked(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(llama.runner, NativeRunner)
    beyond, wider = torch.arange(1, VOCAB + 1, dtype=torch.int32), VOCAB + 1
    for vocabulary, limit, counts, message in (
        (DraftVocabulary(wider, wider), 3, None, f"chains of {wider} of {wider} tokens, and the model reads {VOCAB}"),
        (DraftVocabulary(VOCAB, wider, beyond), 3, None, f"the token {VOCAB} of logit {VOCAB - 1} among {VOCAB}"),
        (DraftVocabulary(VOCAB, VOCAB), 60, 1, "row 8 is written to cache row 67, and its sequence has 64"),
    ):
        handle = llama.open(text(FIRST, 1))
        with monkeypatch.context() as patch:
            patch.setattr(llama, "_vocabulary", vocabulary)
            if counts is not None:
                patch.setattr(llama.runner._pages, "count", lambda slot, counts=counts: counts)
            with pytest.raises(KernelArgumentError, match=message):
                llama.chains([handle], [ChainRequest(limit)], vocabulary.width)
        llama.close(handle)


def test_moves_are_checked(llama: Decoder) -> None:
    one = OnePass(llama)
    slot, spec, move = one.handles[1].slot, one.runner._spec, one.runner._library.foretoken_move
    pages, count = one.runner._pages.addresses(slot), one.runner._pages.count(slot)
    for destination, rows in ((64, [66, 128]), (64, [66, 64]), (-1, [66])):
        sources = array("i", rows)
        with pytest.raises(KernelArgumentError, match="is moved to row"):
            move(spec, pages, count, destination, sources.buffer_info()[0], len(sources))
    one.close()


def test_a_kind_of_matrices_that_is_not_linked_is_refused(llama: Decoder) -> None:
    assert isinstance(llama.runner, NativeRunner)
    kernels = load(linked("decoder", decoder_sources([Kind.FLOAT32], [Kind.FLOAT32]), require()))
    with pytest.raises(KernelsUnavailable, match=r"no kernels for matrices of the kinds \[2\]"):
        DecoderFunctions(kernels, [Kind.FLOAT32, Kind.INT8], Kind.FLOAT32)
    spec = ModelSpec.from_buffer_copy(llama.runner._spec)
    spec.head.kind = Kind.INT8
    with pytest.raises(
        KernelArgumentError, match=r"the vocabulary head .* weights of kind 2, whose kernels are not linked"
    ):
        DecoderFunctions(kernels, [Kind.FLOAT32], Kind.FLOAT32).workspace(spec)


def test_structures_that_differ_from_the_library_are_named() -> None:
    require()
    kernels = load(linked("decoder", decoder_sources([Kind.FLOAT32], [Kind.FLOAT32]), require()))

    def changed(mirror: type[ctypes.Structure], fields: list[Any]) -> Any:
        return type(mirror.__name__, (ctypes.Structure,), {"_fields_": fields})

    fields = list(BatchSpec._fields_)
    swapped = [*fields[:-2], fields[-1], fields[-2]]
    for other, name in ((swapped, "BatchSpec.source_reach"), (fields[:-2], "BatchSpec"), (fields[1:], "BatchSpec")):
        with pytest.raises(RuntimeError, match=f"{name}.* make the ctypes structure equal"):
            check_layout(kernels, [changed(BatchSpec, other)])
    with pytest.raises(RuntimeError, match=r"NormSpec is 16 bytes at 0 in .* and missing in Python"):
        check_layout(kernels, [Matrix])


def test_a_wrong_pass_leaves_the_model_usable(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = text(20, 3)
    expected = llama.score([llama.open(prompt)], [Draft.empty()])[0].logits
    handle = llama.open(prompt)
    with monkeypatch.context() as patch:
        patch.setattr(llama, "check_tokens", lambda tokens: None)
        wrong = Handle(handle.slot, [*prompt[:-1], VOCAB + 5])
        with pytest.raises(KernelArgumentError, match=f"token {VOCAB + 5}"):
            llama.score([wrong], [Draft.empty()])
    assert torch.equal(llama.score([handle], [Draft.empty()])[0].logits, expected)
