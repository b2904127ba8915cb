"""Text that a target writes from nothing."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.train.test_cli import invoke
from tests.train.tiny import TINY
from torch import Tensor

from foretoken import zoo
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.train import sampling
from foretoken.train.data import (
    END,
    Corpus,
    beginnings,
    sample_continuations,
    starts_of,
    train_tokenizer,
    turns_of,
    without_duplicates,
)
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.sampling import (
    MAX_TURN,
    Sampler,
    TransformersSteps,
    Turns,
    mixed_temperatures,
    open_decoder,
    sample_windows,
)
from foretoken.train.target import new_model, save

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
CPU = torch.device("cpu")
VOCABULARY = 20
STOP, SYSTEM, USER, ANSWER = 1, 2, 3, 4
TURNS = Turns((SYSTEM, USER), (STOP, ANSWER), (STOP, USER), (0, STOP))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = load_tokenizer(zoo.path("target"))
    save(new_model(TINY, tokenizer, 0), tokenizer, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write(
    choose: Callable[[int], int], count: int = 40, starts: list[list[int]] | None = None, turns: Turns = TURNS
) -> list[list[int]]:
    """Returns texts for a model that wants the token ``choose(position)``, greedily."""
    starts = starts or [[SYSTEM, USER, 9], [SYSTEM, USER]]
    cold = torch.zeros(len(starts))
    sampler = Sampler(turns, starts, cold, cold, CPU, 0)
    tokens = [sampler.begin()]
    for at in range(tokens[0].shape[1], count):
        logits = torch.zeros(len(starts), VOCABULARY)
        logits[:, choose(at)] = 5.0
        tokens.append(sampler.next(logits)[:, None])
    return torch.cat(tokens, dim=1).tolist()


def test_the_template_separates_the_turns_of_a_conversation() -> None:
    def choose(at: int) -> int:
        return 0 if at % 5 == 4 else 7  # each fifth token is an end that is not the template's own

    first, second = write(choose, 16)
    assert first == [SYSTEM, USER, 9, 7, STOP, ANSWER, 7, 7, 7, STOP, USER, 7, 7, 7, STOP, ANSWER]
    assert second == [SYSTEM, USER, 7, 7, STOP, ANSWER, 7, 7, 7, STOP, USER, 7, 7, 7, STOP, ANSWER]


def test_a_turn_without_an_end_is_ended() -> None:
    text = write(lambda _: 7, MAX_TURN + 20, [[SYSTEM, USER]])[0]
    assert text.index(STOP) == MAX_TURN + 1
    assert text[text.index(STOP) :][:2] == [STOP, ANSWER]


def test_a_document_goes_on_after_its_end() -> None:
    assert write(lambda at: 0 if at == 3 else 7, 6, [[5]], Turns((5,), (), (), (0,))) == [[5, 7, 7, 0, 7, 7]]


def test_samples_follow_the_distribution_at_the_temperature_of_the_turn() -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[[0, STOP]] = -torch.inf
    count = 20_000
    for answering, heat in ((False, 0.7), (True, 1.3)):
        heats = (torch.full((count,), 0.7), torch.full((count,), 1.3))
        sampler = Sampler(TURNS, [[SYSTEM]] * count, *heats, CPU, 3)
        sampler.begin()
        sampler.answering += answering
        shares = torch.bincount(sampler.next(logits.repeat(count, 1)), minlength=VOCABULARY) / count
        assert (shares - (logits / heat).softmax(-1)).abs().max() < 0.015


def test_turns_are_read_from_the_chat_template(target: Path) -> None:
    tokenizer = load_tokenizer(target)
    turns, kind = turns_of(tokenizer, [0])
    assert kind == "conversations"
    parts = (turns.opening, turns.answer, turns.request)
    assert [tokenizer.decode(list(part)) for part in parts] == ["<user>", f"{END}<assistant>", f"{END}<user>"]
    assert turns.ends == (0,)


@pytest.mark.parametrize(
    "template", [None, "{{ messages[-1].content }}", "{{ raise_exception('no') }}", TEMPLATE.replace(END, "\n")]
)
def test_without_a_usable_template_the_model_writes_documents(target, tmp_path, template):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(target / name, tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    turns, kind = turns_of(load_tokenizer(tmp_path), [0])
    assert (kind, turns.answer, turns.opening) == ("documents", (), (0,))


def test_beginnings_are_reproducible_and_various() -> None:
    first, again = (beginnings(np.random.default_rng(4), 400) for _ in range(2))
    assert first == again
    assert len(set(first)) > 120
    assert 80 < first.count("") < 160
    assert not any("{" in text or text != text.rstrip(" ") for text in first)


def test_duplicates_are_dropped_and_half_of_the_answers_greedy() -> None:
    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [0, 0]])
    assert without_duplicates(rows).tolist() == [[1, 2], [3, 4], [0, 0]]
    heats = mixed_temperatures(np.random.default_rng(0), 4000, 0.5, 0.25)
    assert abs(float((heats == 0).float().mean()) - 0.5) < 0.03
    assert abs(float((heats == 1).float().mean()) - 0.25) < 0.03


def test_both_decoders_give_the_logits_of_one_forward_pass(target: Path) -> None:
    frozen = FrozenTarget(target, CPU)
    ids = torch.randint(0, 4000, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = frozen.logits(ids).float()
        with open_decoder(target, target, CPU, 12) as decoder:
            for steps in (TransformersSteps(frozen.model, 12), decoder.begin()):
                steps(ids[:, :5])
                logits: Tensor = torch.stack([steps(ids[:, at : at + 1]) for at in range(5, 12)], dim=1)
                assert (logits.float() - expected[:, 5:]).abs().max() < 0.05


def test_batches_and_the_time_limit(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BATCH", 2)
    tokenizer = load_tokenizer(target)
    turns, _ = turns_of(tokenizer, [0])
    starts, temperatures = partial(starts_of, tokenizer, turns), torch.zeros(5)
    with open_decoder(target, target, CPU, 24) as decoder:
        whole = sample_windows(decoder, turns, starts, temperatures, 24, 0)
        limited = sample_windows(decoder, turns, starts, temperatures, 24, 0, 0.0)
        with pytest.raises(InvalidRequest, match="lower --window"):
            sample_windows(decoder, turns, starts, temperatures, 65, 0)
    assert whole.shape == (5, 24)
    assert torch.equal(limited, whole[:2])
    assert all(tokenizer.decode(row.tolist()).startswith("<user>") for row in whole)


def test_prompts_of_a_corpus_are_continued(target: Path) -> None:
    stream = torch.arange(300, 700)
    with open_decoder(target, target, CPU, 60) as decoder:
        windows = sample_continuations(decoder, stream, torch.tensor([0.0, 1.0, 0.5]), 60, 0)
    lengths = [int((row.diff() != 1).nonzero()[0]) + 1 for row in windows]
    assert windows.shape == (3, 60) and min(lengths) >= 30
    assert (windows[:, 0] >= 300).all()


@pytest.mark.slow
def test_a_head_is_trained_without_data(target: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    options = ["--windows", "4", "--held-out", "2", "--steps", "2", "--batch", "2", "--window", "24", "--depths", "2"]
    invoke("train", "mtp", head, "--model", target, *options, "--device", "cpu", "--no-compile")
    card = json.loads((head / "provenance.json").read_text())
    assert card["corpus"] == "the target's own text"
    assert "--data" not in card["command"]


def test_a_tokenizer_without_an_end_still_begins_a_document(corpus: Corpus) -> None:
    assert turns_of(train_tokenizer(corpus), [])[0].opening == (0,)
