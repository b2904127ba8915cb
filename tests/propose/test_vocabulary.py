"""Tokenizers as bytes, and drafts that have another one."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.graphed import on_graphs
from tests.models.tiny import only_runner
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models import device_drafts
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel
from foretoken.propose.pieces import Pieces, Script
from foretoken.propose.vocabulary import (
    RetokenizedSequence,
    SharedTokenModel,
    SlemProposer,
    VocabularyConfig,
    continued,
)
from foretoken.train.data import Corpus, train_tokenizer

TARGET = zoo.path("target")
TEXT = (
    "def greet(name):\n    return f'hello {name}, größe 5 €'\n\n",
    'class Ünïcode:\n    """日本語 emoji 🙂🙃 and   spaces"""\n\tx = 1\n',
    "for i in range(10):\n    print(i, i * i)\n",
)
TEXTS = st.one_of(st.text(max_size=30), st.text("aneto €日\n", max_size=30))
ENDS = st.tuples(st.integers(0, 40), st.integers(0, 40))
PAIRS = [("tokenizer", "other"), ("other", "tokenizer"), ("metaspace", "tokenizer"), ("tokenizer", "metaspace")]


@pytest.fixture(scope="module")
def other() -> Any:
    """Byte-level BPE of the same text with fewer merges."""
    return train_tokenizer(Corpus("test", TEXT * 3, TEXT), vocab_size=290)


@pytest.fixture(scope="module")
def metaspace() -> Any:
    """As sentencepiece makes them: a space before the text, bytes for what has no token."""
    words = ["▁", "a", "n", "e", "t", "o", "A", "▁a", "an", "▁an", "e€", "to"]
    tokens = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    merges = [("▁", "a"), ("a", "n"), ("▁a", "n"), ("t", "o")]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft with three quarters of its merges and its tokens in another order."""
    source, folder = zoo.path("draft"), tmp_path_factory.mktemp("other-draft")
    state = json.loads((source / "tokenizer.json").read_text())
    model = state["model"]
    gone = {"".join(pair) for pair in model["merges"][3000:]} - {"".join(pair) for pair in model["merges"][:3000]}
    tokens = sorted(token for token in model["vocab"] if token not in gone)
    random.Random(0).shuffle(tokens)
    rows = [model["vocab"][token] for token in tokens]
    model["vocab"], model["merges"] = {token: i for i, token in enumerate(tokens)}, model["merges"][:3000]
    end = state["added_tokens"][0]["content"]
    state["added_tokens"][0]["id"] = model["vocab"][end]
    backend = Tokenizer.from_str(json.dumps(state))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end).save_pretrained(folder)
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][rows].contiguous()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": len(tokens)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# what tokens spell


@pytest.mark.parametrize("name", ["tokenizer", "other", "metaspace"])
@given(text=TEXTS, ends=ENDS)
@settings(max_examples=40, deadline=None)
def test_any_bytes_round_trip(request: pytest.FixtureRequest, name: str, text: str, ends: tuple[int, int]) -> None:
    """Also those that begin or end within a character."""
    pieces = Pieces(request.getfixturevalue(name))
    data = text.encode()[min(ends) : max(ends)]
    assert pieces.spell(pieces.encode(data)) == data


def test_pieces_add_no_space_and_no_special_token(tokenizer: Any, metaspace: Any) -> None:
    text = TEXT[1]
    assert Pieces(tokenizer).encode(text.encode()) == tokenizer.encode(text)
    pieces = Pieces(metaspace)
    assert pieces.spaced and not Pieces(tokenizer).spaced
    assert pieces.encode(b" an a") == metaspace.encode("an a", add_special_tokens=False)
    assert pieces.spelled[pieces.ids[b"A"]] == b"A" and metaspace.convert_ids_to_tokens(pieces.ids[b"A"]) == "A"
    assert pieces.specials == {0: "<unk>", 1: "<s>"}


def test_the_name_of_a_special_token_is_plain_text(tokenizer: Any) -> None:
    pieces = Pieces(tokenizer)
    end = tokenizer.eos_token
    assert tokenizer.eos_token_id in pieces.specials
    assert tokenizer.eos_token_id not in pieces.encode(end.encode())
    assert pieces.spell([tokenizer.eos_token_id]) == b""


def test_tokenizers_that_lose_text_are_refused() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequest, match="are not known"):
        Pieces(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        Pieces(object())


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["compiled", "graphs"])
def test_text_is_drafted_in_one_call_as_level_by_level(
    runner: str, tokenizer: Any, other_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Tensor] = []
    monkeypatch.setattr(device_drafts, "fetched", lambda tensor: (read.append(tensor), tensor)[1])
    target, drafts = Pieces(tokenizer), []
    tokens = [target.encode(text.encode()) for text in TEXT]
    with on_graphs() if runner == "graphs" else only_runner("compiled"):
        model = load_model(other_draft, "float32", "cpu", "native")
        for at_once in (True, False):
            monkeypatch.setattr(model.runner, "computes_chains", at_once)
            proposer = SlemProposer(model, target, Pieces(load_tokenizer(other_draft), model.vocab_size))
            contexts = [Context(i, [*ids], len(ids), SamplingLaw(0.0), Streams(i)) for i, ids in enumerate(tokens)]
            drafts.append(proposer.propose(contexts, [5, 9, 2]))
            for context, draft, wrong in zip(contexts, drafts[-1], tokens, strict=True):
                emitted = [*draft.ids[:1], *wrong[:2]]
                context.tokens += emitted
                proposer._sequences[context.id].commit(emitted)
            drafts[-1] += proposer.propose(contexts, [3, 4, 5])
    assert drafts[0] == drafts[1] and all(map(len, drafts[0]))
    assert len(read) == 2 * (runner == "graphs")


# one text in two vocabularies


@pytest.mark.parametrize("name", ["tokenizer", "metaspace"])
def test_ids_that_the_draft_model_lacks_are_not_used(name: str, request: pytest.FixtureRequest) -> None:
    """Tokenizers may have tokens, for instance special ones, that were added behind the model's embedding."""
    tokenizer = request.getfixturevalue(name)
    whole = Pieces(tokenizer)
    limit = max(whole.encode("".join(TEXT).encode()))
    pieces, end = Pieces(tokenizer, limit), max(whole.specials)
    assert max(pieces.encode("".join(TEXT).encode())) < limit
    script = Script(whole, pieces, [*whole.encode(TEXT[0].encode()), end, *whole.encode(TEXT[1].encode())])
    assert script.ids and max(script.ids) < limit


@pytest.mark.parametrize("pair", PAIRS)
def test_a_script_grows_as_the_text_does(request: pytest.FixtureRequest, pair: tuple[str, str]) -> None:
    source, own = (Pieces(request.getfixturevalue(name)) for name in pair)
    tokens = source.encode("".join(TEXT).encode() * 3)
    script = Script(source, own, tokens[:1])
    before = list(script.ids)
    for at in range(1, len(tokens), 2):
        start = script.extend(tokens[at : at + 2])
        assert script.ids[:start] == before[:start]
        before = list(script.ids)
    text = source.spell(tokens)
    if source.spaced:
        text = text.removeprefix(b" ")
    assert own.spell(script.ids) == (b" " if own.spaced else b"") + text
    # Cut now and then at the end alone, it is nearly as short as the whole text cut at once.
    assert len(script.ids) <= len(own.encode(own.spell(script.ids))) * 1.05


def test_special_tokens_map_by_content(tokenizer: Any, metaspace: Any, other: Any) -> None:
    source, end = Pieces(tokenizer), tokenizer.eos_token_id
    same = Script(source, Pieces(other), [end, *source.encode(b"a "), end, *source.encode(b"b")])
    assert same.ids == [other.eos_token_id, *other.encode("a "), other.eos_token_id, *other.encode("b")]
    without = Script(source, Pieces(metaspace), [end])
    assert len(without.ids) == 1  # it has no counterpart, and an empty text needs some token
    without.extend(source.encode(b"an"))
    assert Pieces(metaspace).spell(without.ids) == b" an"


def test_continuations_are_tokenized_with_the_preceding_tokens(tokenizer: Any) -> None:
    pieces = Pieces(tokenizer)
    for text, more in (("for i in range(10):\n   ", " print(i, i"), ("größ", "e 5 €'\n"), ("日本", "語 emoji")):
        before = pieces.encode(text.encode())
        after = continued(pieces, before, more.encode())
        assert pieces.spell([*before, *after]) == (text + more).encode()
    assert continued(pieces, [tokenizer.eos_token_id], b"x = 1") == pieces.encode(b"x = 1")


# a draft with another tokenizer


def test_the_draft_keeps_its_unchanged_tokens(tokenizer: Any, other: Any) -> None:
    source, own = Pieces(tokenizer), Pieces(other)
    model = ToyModel(len(other), max_length=200)
    tokens = source.encode("".join(TEXT).encode() * 4)
    reader = RetokenizedSequence(model, source, own, tokens[:20])
    for at in range(20, len(tokens)):
        model.score([reader.handle], [Draft.chain([3, 4])])
        reader.commit(tokens[at : at + 1])
        assert reader.handle.tokens == reader.script.ids
        assert len(reader.handle.pending) <= 24
        reader.fit(8)
        assert len(reader.handle.tokens) + 8 <= model.max_length


def test_rows_are_the_drafts_own_on_shared_tokens(tokenizer: Any, other: Any) -> None:
    source, own = Pieces(tokenizer), Pieces(other)
    model = ToyModel(len(other))
    translated = SharedTokenModel(model, source, own, len(tokenizer))
    handle = translated.open(source.encode(b"for i in"))
    row = translated.score([handle], [Draft.chain([])])[0].logits[0]
    expected = model.logits(own.encode(b"for i in"))
    for token, piece in enumerate(source.spelled):
        counterpart = own.special_ids.get(source.specials.get(token, "")) if piece is None else own.ids.get(piece)
        assert float(row[token]) == (float("-inf") if counterpart is None else float(expected[counterpart]))


@pytest.mark.slow
def test_bundled_target_with_another_tokenizer(other_draft: Path) -> None:
    """One text per seed, and more than the target alone writes in a pass; sampled drafts too."""
    plain = LLM(TARGET)
    for params in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 2}):
        settings = SamplingParams(max_tokens=24, ignore_eos=True, **params)  # type: ignore[arg-type]
        texts = [o.outputs[0].token_ids for o in plain.generate(list(FUNCTIONS[:5]), settings)]
        for algorithm in ("slem", "tli"):
            config = {"method": "vocabulary", "model": str(other_draft), "algorithm": algorithm}
            llm = LLM(TARGET, speculative_config={**config, "control": "fixed"})
            outputs = llm.generate(list(FUNCTIONS[:5]), settings)
            assert [o.outputs[0].token_ids for o in outputs] == texts
            length = sum(o.stats.tokens for o in outputs) / sum(o.stats.steps for o in outputs)
            assert length > (1.8 if params["temperature"] == 0.0 else 1.2)
            alone = [llm.generate(prompt, settings)[0].outputs[0].token_ids for prompt in FUNCTIONS[:2]]
            assert alone == texts[:2]


def test_the_default_follows_the_temperature(other_draft: Path) -> None:
    config = {"method": "vocabulary", "model": str(other_draft), "control": "fixed"}
    llm = LLM(TARGET, speculative_config=config)
    greedy = llm.generate(FUNCTIONS[0], SamplingParams(max_tokens=12, temperature=0.0))[0]
    drawn = llm.generate(FUNCTIONS[0], SamplingParams(max_tokens=12, temperature=1.0))[0]
    assert greedy.stats.drafts and drawn.stats.drafts


def test_it_needs_a_draft_and_a_known_algorithm(other_draft: Path) -> None:
    with pytest.raises(InvalidRequest, match="needs a draft"):
        LLM(TARGET, speculative_config={"method": "vocabulary"})
    with pytest.raises(InvalidRequest, match="algorithm"):
        VocabularyConfig(algorithm="best")
    tokenizer = Pieces(load_tokenizer(TARGET))
    backend = Tokenizer(models.BPE({"ſ": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    strange = Pieces(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(InvalidRequest, match="no token in common"):
        SharedTokenModel(ToyModel(1), tokenizer, strange, 4096)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_drafts_cache_counts_and_is_reused(temperature: float, other_draft: Path) -> None:
    llm = LLM(
        zoo.path("draft"),
        other_draft,
        speculative_config={"method": "vocabulary", "num_speculative_tokens": 4},
        dtype="float32",
        enable_prefix_caching=True,
    )
    proposer: Any = llm.engine.proposer
    assert proposer.kv_bytes_per_token == proposer.model.kv_bytes_per_token > 0
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3, ignore_eos=True)
    prompt = "def greet(name):\n    return name\n\n" * 12
    (plain,) = llm.generate([prompt], replace(params, speculative_tokens=0))
    outputs = [llm.generate([prompt], params)[0] for _ in range(3)]
    assert all(output.outputs[0].token_ids == plain.outputs[0].token_ids for output in outputs)
    assert all(output.stats.drafted for output in outputs)
