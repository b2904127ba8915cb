"""Text that a target writes from nothing: both sides of conversations (Magpie, 2406.08464), or documents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.engine.chat_template import apply_template, own_template
from foretoken.train.progress import Reporter
from foretoken.train.topics import beginnings

LONGEST_TURN = 448  # tokens; a greedy answer of a small model may never end
SAME = 96  # windows whose first tokens are equal count as duplicates
_MARKS = ("QXFIRST", "QXSECOND", "QXTHIRD")


class Steps(Protocol):
    """Decodes a batch of sequences, one token each at a time."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Appends tokens [B], and returns the logits [B, V] of the next ones."""


@dataclass(frozen=True)
class Turns:
    """Token ids between the turns of a conversation. A model without a chat template has an opening alone.

    Args:
        opening: Before the first request.
        answer: Between a request and its answer. The first one ends the request.
        request: Between an answer and the next request. The first one ends the answer.
        ends: Ids that end a turn, or a document.
    """

    opening: tuple[int, ...]
    answer: tuple[int, ...]
    request: tuple[int, ...]
    ends: tuple[int, ...]


def turns_of(tokenizer: Any, ends: list[int]) -> tuple[Turns, str]:
    """Returns the turns of a model with these end-of-sequence ids, and what it writes: conversations or documents.

    Conversations need a chat template that keeps earlier turns and ends an answer with one of ``ends``.
    """
    try:
        own_template(tokenizer, "this model", "")
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        rest: str = apply_template(tokenizer, messages, tokenize=False)
        parts = []
        for mark in _MARKS:
            before, rest = rest.split(mark, 1)
            parts.append(tuple(tokenizer.encode(before, add_special_tokens=False)))
        opening, answer, request = parts
        if request[0] in ends and opening:
            marked = [answer[0]] if tokenizer.decode([answer[0]], skip_special_tokens=True) == "" else []
            return Turns(opening, answer, request, tuple({*ends, *marked})), "conversations"
    except (InvalidRequest, ValueError, IndexError):  # no template, or one that leaves out earlier turns
        pass
    start = tuple(tokenizer.encode("", add_special_tokens=True)) or tuple(ends[:1]) or (0,)
    return Turns(start, (), (), tuple(ends)), "documents"


class Writer:
    """Chooses the tokens of a batch of texts: those of the template, and samples elsewhere.

    Args:
        turns: The model's.
        starts: Tokens of each text that are given, [B] lists.
        request_heat: Temperatures of the requests [B].
        answer_heat: Temperatures of the answers [B].
        device: Device of the logits.
        seed: Seed of the samples.
    """

    def __init__(
        self,
        turns: Turns,
        starts: list[list[int]],
        request_heat: Tensor,
        answer_heat: Tensor,
        device: torch.device,
        seed: int,
    ) -> None:
        bridges = [list(turns.answer), list(turns.request)]
        width = max(map(len, [*starts, *bridges]))
        self.bridges = _padded(bridges, width, device)
        self.bridge_lengths = torch.tensor([len(bridge) for bridge in bridges], device=device)
        self.given, self.count = _padded(starts, width, device), torch.tensor(list(map(len, starts)), device=device)
        self.at = torch.zeros_like(self.count)
        self.answering = torch.zeros_like(self.count)
        self.age = torch.zeros_like(self.count)
        self.heats = torch.stack((request_heat, answer_heat)).to(device)
        self.ends = torch.tensor(turns.ends, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def first(self) -> Tensor:
        """Returns the first token of each text [B]."""
        self.at += 1
        return self.given[:, 0]

    def next(self, logits: Tensor) -> Tensor:
        """Returns the next token of each text [B]. ``logits`` [B, V] are changed."""
        logits = logits.float()
        heat = self.heats.gather(0, self.answering[None])[0]
        noise = torch.empty_like(logits).exponential_(generator=self.generator).clamp_(min=1e-20).log_()
        sampled = torch.addcmul(logits, noise, heat[:, None], value=-1, out=noise).argmax(-1)  # the Gumbel maximum
        pending = self.at < self.count
        given = self.given.gather(1, self.at.clamp(max=self.given.shape[1] - 1)[:, None])[:, 0]
        token = torch.where(pending, given, sampled)
        self.at += pending
        self.age = torch.where(pending, 0, self.age + 1)
        if self.bridge_lengths[0] == 0:
            return token
        ended = ~pending & (torch.isin(sampled, self.ends) | (self.age >= LONGEST_TURN))
        self.given = torch.where(ended[:, None], self.bridges[self.answering], self.given)
        self.count = torch.where(ended, self.bridge_lengths[self.answering], self.count)
        self.at = torch.where(ended, 1, self.at)
        token = torch.where(ended, self.given[:, 0], token)
        self.answering = self.answering ^ ended.long()
        return token


def _padded(lists: list[list[int]], width: int, device: torch.device) -> Tensor:
    return torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in lists], device=device)


@torch.inference_mode()
def write_windows(
    open_steps: Callable[[int], Steps],
    tokenizer: Any,
    turns: Turns,
    heats: Tensor,
    length: int,
    batch: int,
    seed: int,
    device: torch.device,
    limit_seconds: float | None = None,
) -> Tensor:
    """Lets the target write windows of text.

    Args:
        open_steps: Returns what decodes a batch of so many new sequences.
        tokenizer: The model's tokenizer.
        turns: The model's turns.
        heats: Temperatures of the answers, [N].
        length: Tokens of a window.
        batch: Windows at a time.
        seed: Seed of the requests and samples.
        device: Device of the logits.
        limit_seconds: Time after which no further batch begins.

    Returns:
        Token ids [N, length], in the order of ``heats``. At the time limit, fewer, but at least one batch.
    """
    rows: list[Tensor] = []
    done, started = 0, time.monotonic()
    with Reporter("the target writes text") as report:
        while done < len(heats):
            rng = np.random.default_rng([seed, 4, done])
            count = min(batch, len(heats) - done)
            own = heats[done : done + count]
            if turns.answer:
                starts = [[*turns.opening, *_ids(tokenizer, text)][:length] for text in beginnings(rng, count)]
                requests = torch.from_numpy(rng.uniform(0.6, 1.0, count)).float()
            else:
                starts, requests = [list(turns.opening)] * count, own
            writer = Writer(turns, starts, requests, own, device, int(rng.integers(2**62)))
            steps, tokens = open_steps(count), [writer.first()]
            for at in range(1, length):
                tokens.append(writer.next(steps(tokens[-1])))
                if at % 64 == 0:
                    spent = time.monotonic() - started
                    written = (done * length + count * at) / spent
                    report.update((done + count * at / length) / len(heats), f"{written:,.0f} tok/s")
            rows.append(torch.stack(tokens, dim=1).cpu())
            done += count
            if limit_seconds is not None and time.monotonic() - started > limit_seconds:
                break
        windows = torch.cat(rows)
        spent = time.monotonic() - started
        report.line(
            f"the target wrote {windows.numel():,} tokens in {spent:.0f} s ({windows.numel() / spent:,.0f} tok/s)"
        )
    return windows


def without_duplicates(windows: Tensor) -> Tensor:
    """Returns the windows [N, T] whose first tokens are those of no earlier one."""
    _, first = np.unique(windows[:, :SAME].numpy(), axis=0, return_index=True)
    return windows[torch.from_numpy(np.sort(first))]


def mixed_heats(rng: np.random.Generator, count: int) -> Tensor:
    """Returns temperatures of answers: half are greedy, a quarter 1, the others uniform between."""
    kinds, between = rng.random(count), rng.random(count)
    return torch.from_numpy(np.where(kinds < 0.5, 0.0, np.where(kinds < 0.75, 1.0, between))).float()


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
