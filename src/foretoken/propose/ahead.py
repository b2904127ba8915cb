"""The worker that drafts while another verifies (PEARL's post-verify, 2408.11850; DSI, 2405.14105).

It holds a proposer and its own copy of every sequence. When a draft is made and sent it goes on as if the target had
taken all of it, with its own guess at the target's next token, and sends what it drafts behind that, too. If the
verdict agrees, the next draft is there at once; if not, what was drafted ahead is dropped, a pass that nobody needs any
more is called off, and drafting starts again behind what was emitted.

None of this shows in what is drafted. Random numbers are addressed by seed and position, so a draft behind a text is
the same whenever it is made, and the engine takes one only for exactly the text that it has and exactly the budget that
the round was granted: budgets stay decided before anything is drawn (non-anticipation), and a guess that fails is only
waste. That takes a proposer whose drafts follow from the text alone (``goes_back``); any other drafts when it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.step import Step, Timings
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.models.resumable import Resumable
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.draft_model import DraftModel
from foretoken.propose.links import Closed, Line
from foretoken.propose.wire import Commit, Frame, Hello, Made, Trouble, encode

_UNTIMED = Timings(0.0, 0.0, 0.0, 0.0, 1)
_NO_SCORES = Scores(torch.empty(0, 0))


class CalledOff(Exception):
    """What is being drafted is of no use any more."""


@dataclass(eq=False, slots=True)
class Twin:
    """One sequence. truth: what was emitted. context: what the proposer was told, which may go on with a guess.

    made: drafts behind texts that ``context`` begins with, by the lengths of those texts. budget: the last one of a
    round. due: somebody waits for a draft of it. active: the last round wanted a draft, so the next one may. read: the
    proposer knows the whole text, and has drafted. wrong: a guess that ``context`` holds has failed.
    """

    context: Context
    truth: list[int]
    made: dict[int, Made] = field(default_factory=dict)
    budget: int = 0
    due: bool = False
    active: bool = False
    read: bool = False
    wrong: bool = False

    def commit(self, commit: Commit) -> None:
        """The truth goes on."""
        at = len(self.truth)
        self.truth.extend(commit.tokens)
        guessed = self.context.tokens[at : len(self.truth)]
        self.wrong |= guessed != self.truth[at : at + len(guessed)]
        self.made = {length: made for length, made in self.made.items() if length >= len(self.truth)}
        self.budget = commit.budget or self.budget
        self.active, self.due = commit.budget > 0, False

    def ready(self, prefixes: bool) -> bool:
        """Whether a draft behind the truth, of the budget at hand, was made and sent."""
        made = self.made.get(len(self.truth))
        return made is not None and not self.wrong and made.fits(self.budget, prefixes)


class Drafter:
    """See the module. ahead: rounds that are drafted before their verdicts are known, 0 to wait for each.

    models: what ``proposer`` drafts with, so that a pass can be called off and a sequence gone on from.
    """

    def __init__(self, proposer: Proposer, line: Line, ahead: int = 1, models: Sequence[Resumable] = ()) -> None:
        self.proposer, self.line, self.models = proposer, line, models
        self.ahead = ahead if goes_back(proposer) else 0
        self.prefixes = shortens(proposer)
        self._twins: dict[int, Twin] = {}
        self._forgotten: list[Twin] = []
        self._running: dict[int, int] = {}  # in the call at hand: serials, and nodes that are drafted
        for model in models:
            model.before = self._listen

    @torch.inference_mode()
    def run(self) -> None:
        """Until the engine is gone."""
        try:
            self.line.reply(encode(Hello(self.proposer.learns, self.prefixes)))
            while True:
                self._take_in()
                if not self._step():
                    self._apply(Frame.decode(self.line.wait()))
        except Closed:
            return

    # what comes in

    def _take_in(self) -> None:
        while (message := self.line.poll()) is not None:
            self._apply(Frame.decode(message))

    def _apply(self, frame: Frame) -> None:
        """Note it. Where it may be ahead the proposer can be in the middle of a call, and is told later."""
        for serial in frame.forgotten:
            twin = self._twins.pop(serial, None)
            if twin is not None:
                self._forgotten.append(twin)
        for opening in frame.opened:
            self._twins[opening.serial] = Twin(opening.context(), list(opening.tokens))
        for commit in frame.committed:
            twin = self._twins[commit.serial]
            if not self.ahead:
                self._observe(twin, commit)
            twin.commit(commit)
        for ask in frame.asked:
            twin = self._twins[ask.serial]
            twin.budget, twin.due, twin.active = ask.budget, True, True

    def _listen(self) -> None:
        """Before every pass. Raises CalledOff where something came in that makes the call at hand useless."""
        if self.ahead and self._running:
            self._take_in()
            if any(self._useless(serial, budget) for serial, budget in self._running.items()):
                raise CalledOff

    def _useless(self, serial: int, budget: int) -> bool:
        twin = self._twins.get(serial)
        if twin is None or twin.wrong:
            return True
        ahead = len(twin.context.tokens) - len(twin.truth)
        awaited = twin.due and not twin.ready(self.prefixes)
        return ahead < 0 or (awaited and (ahead > 0 or not _enough(budget, twin.budget, self.prefixes)))

    # what there is to do

    def _step(self) -> bool:
        """One thing, the most urgent. -> whether there was any"""
        while self._forgotten:
            context = self._forgotten.pop().context
            self.proposer.forget(context)
            for model in self.models:
                model.release(context.id)
        wanted = [twin for twin in self._twins.values() if self._wants(twin)]
        if wanted:
            self._draft(wanted)
            return True
        going = [twin for twin in self._twins.values() if self._goes_on(twin)]
        if going:
            self._go_ahead(going)
        return bool(going)

    def _wants(self, twin: Twin) -> bool:
        """Whether a draft behind the truth is to be made: it is waited for, or soon will be."""
        return (twin.due or bool(self.ahead and twin.active and twin.read)) and not twin.ready(self.prefixes)

    def _goes_on(self, twin: Twin) -> bool:
        made = twin.made.get(len(twin.context.tokens))
        guesses = sum(length > len(twin.truth) for length in twin.made)
        return twin.active and not twin.wrong and guesses < self.ahead and made is not None and len(made.draft) > 0

    def _draft(self, twins: Sequence[Twin]) -> None:
        """Behind the truth."""
        try:
            for twin in twins:
                self._to_truth(twin)
            self._propose(twins)
        except CalledOff:
            self._drop(twins)
        except Exception as error:
            self._drop(twins)
            if any(twin.due for twin in twins):
                self.line.reply(encode(Trouble(type(error).__name__, str(error))))
            for twin in twins:
                twin.due = twin.active = False

    def _go_ahead(self, twins: Sequence[Twin]) -> None:
        """Behind a guess: all of the last draft (of a tree, its likeliest path), and the token after it."""
        try:
            for twin in twins:
                last = twin.made[len(twin.context.tokens)]
                self._tell(twin, likely_path(last.cut(twin.budget) if self.prefixes else last.draft))
            self._running = {twin.context.id: 1 for twin in twins}
            guesses = self.proposer.propose([_guessing(twin.context) for twin in twins], [1] * len(twins))
            going = [twin for twin, guess in zip(twins, guesses, strict=True) if len(guess)]
            for twin, guess in zip(twins, guesses, strict=True):
                if len(guess):
                    self._tell(twin, guess.ids)
            self._propose(going)
        except CalledOff:
            self._drop(twins)
        except Exception:  # such a text may be impossible; what comes of the true one is said when it is asked for
            self._drop(twins)
            for twin in twins:
                twin.active = False
        finally:
            self._running = {}

    def _propose(self, twins: Sequence[Twin]) -> None:
        """A draft for each, and off it goes."""
        budgets = [twin.budget for twin in twins]
        self._running = {twin.context.id: budget for twin, budget in zip(twins, budgets, strict=True)}
        try:
            drafts = self.proposer.propose([twin.context for twin in twins], budgets) if twins else []
        finally:
            self._running = {}
        found = []
        for twin, budget, draft in zip(twins, budgets, drafts, strict=True):
            tokens = twin.context.tokens
            made = Made(twin.context.id, len(tokens), tuple(tokens[len(twin.truth) :]), budget, draft)
            twin.made[len(tokens)] = made
            twin.read |= len(draft) > 0
            found.append(made)
        if found:
            self.line.reply(encode(tuple(found)))

    # what the proposer knows

    def _to_truth(self, twin: Twin) -> None:
        if twin.wrong or len(twin.context.tokens) > len(twin.truth):
            self._drop([twin])
        elif len(twin.context.tokens) < len(twin.truth):
            self._tell(twin, twin.truth[len(twin.context.tokens) :])

    def _drop(self, twins: Sequence[Twin]) -> None:
        """Back to the truth; a sequence that is opened again finds its rows (``Resumable``)."""
        for twin in twins:
            with ExitStack() as stack:
                for model in self.models:
                    stack.enter_context(model.aside(twin.context.id))
                self.proposer.forget(twin.context)
            here = None if twin.wrong else twin.made.get(len(twin.truth))
            twin.context.tokens[:] = twin.truth
            twin.made, twin.wrong = {} if here is None else {len(twin.truth): here}, False

    def _tell(self, twin: Twin, tokens: Sequence[int]) -> None:
        """The text goes on like this, or let us say so."""
        self._observe(twin, Commit(twin.context.id, tuple(tokens), 0))

    def _observe(self, twin: Twin, commit: Commit) -> None:
        context, tokens = twin.context, commit.tokens
        position, own = context.generated, twin.made.get(len(context.tokens))
        draft = Draft.empty() if own is None or commit.path is None else own.draft
        context.tokens.extend(tokens)
        verdict = Verdict(tuple(commit.path or ()), tokens[-1] if tokens else -1)
        step = Step(context.id, position, draft, verdict, tokens, _UNTIMED, commit.reason)
        self.proposer.observe([context], [Observation(step, _NO_SCORES)])


def goes_back(proposer: Proposer) -> bool:
    """Whether its drafts follow from the text and the budget alone, so that it can be told of another text."""
    return isinstance(proposer, DraftModel) and proposer.stop is None


def shortens(proposer: Proposer) -> bool:
    """Whether its draft of fewer nodes is the beginning of the one of more."""
    return isinstance(proposer, DraftModel) and goes_back(proposer) and proposer.config.tree == "chain"


def likely_path(draft: Draft) -> list[int]:
    """The tokens of the path that is likeliest to be taken whole: at every node the child that ranks highest."""
    path: list[int] = []
    node = -1
    while children := draft.children[node + 1]:
        node = max(children, key=lambda child: _weight(draft, child))
        path.append(draft.ids[node])
    return path


def _weight(draft: Draft, node: int) -> float:
    return float(draft.scores[node]) if draft.scores is not None else draft.chance(node) or 0.0


def _guessing(context: Context) -> Context:
    """For the token that the target adds: with its own noise where that is shared, else the likeliest."""
    if context.exactness is Exactness.TRAJECTORY or context.law.greedy:
        return context
    return replace(context, law=context.law.with_temperature(0.0))


def _enough(budget: int, wanted: int, prefixes: bool) -> bool:
    return budget == wanted or (prefixes and budget > wanted)
