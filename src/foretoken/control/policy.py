"""The draft policy: how much each source drafts, and which of the drafted nodes are verified.

It has a cost model (seconds of passes by rows, of drafting by depth) and an acceptance model. The price of a step's
added seconds is the number of tokens that the usual speed yields in them, so a draft is profitable where its expected
accepted tokens exceed its price (Dinkelbach's method for ratios). Everything is decided before a token is sampled, or
by fixed candidates alone, so that no decision can change the distribution of the output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from foretoken.control.acceptance import CLAIMS, PendingDraft, Rates, SourceRecord, Survival
from foretoken.control.allocation import LengthCandidates, Worst, allocate, min_acceptance
from foretoken.control.base import Controller
from foretoken.control.fixed import caps, halvings, requested, short_of_memory
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.core.context import ChainEnd, Context
from foretoken.core.draft import Decision, Draft, PointMass
from foretoken.core.step import StepOutput, is_decode_only
from foretoken.costs.model import CostModel

RequestKind = tuple[str, bool, object, bool]  # source, greedy, grade, whether there is a prediction


@dataclass(eq=False, slots=True)
class ModelState:
    """One request's drafts by the model of its proposer."""

    survival: Survival  # acceptance by rank
    wait: int  # steps without a draft before the next trial
    since: int  # step of its last draft, or of its last trial that was refused
    length: int = 0  # draft tokens until step ``until``
    gain: float = 0.0  # expected accepted tokens of these
    value: float = 0.0  # these, less their price; of a trial the price alone
    until: int = 0
    trial: bool = False  # whether the last draft was a trial


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """A model's draft that was not compared with the text yet."""

    source: str | None  # name of the model's source, whose claims are to be compared too; None if they are or have none
    requested: int  # number of tokens that it was to have
    verified: int  # number of its nodes that were verified
    step: int  # its step
    draft: Draft  # the draft
    start: int  # number of tokens before it


class Repetition:
    """Notices when a sequence repeats itself, for a look at a bit map per token (a Bloom filter of 2 to 4 bytes each).

    now: Whether the last tokens occurred before; wrongly so in a few per cent of cases.
    began: Whether the tokens that occurred before just became ``_PASSAGE`` in a row.
    """

    _LENGTH, _PASSAGE, _BITS_PER_TOKEN = 3, 6, 16

    def __init__(self) -> None:
        self.now = self.began = False
        self._repeated = 0  # tokens at the end that occurred before, beyond two
        self._bits = bytearray(2048)
        self._end = self._LENGTH

    def update(self, tokens: Sequence[int]) -> None:
        """Reads the tokens that were added."""
        if 8 * len(self._bits) < self._BITS_PER_TOKEN * len(tokens):
            self._bits, self._end = bytearray(self._BITS_PER_TOKEN * len(tokens) // 4), self._LENGTH
        bits, size = self._bits, 8 * len(self._bits)
        self.began = False
        for end in range(self._end, len(tokens) + 1):
            slot = hash(tuple(tokens[end - self._LENGTH : end])) % size
            self.now = bool(bits[slot >> 3] >> (slot & 7) & 1)
            self._repeated = self._repeated + 1 if self.now else 0
            self.began |= self._repeated == self._PASSAGE - self._LENGTH + 1
            bits[slot >> 3] |= 1 << (slot & 7)
        self._end = max(self._end, len(tokens) + 1)


@dataclass(eq=False, slots=True)
class RequestDrafts:
    """State of one request."""

    # acceptance of each source that copies text, by its name
    copies: dict[str, SourceRecord] = field(default_factory=dict)
    model: ModelState | None = None  # its drafts by a model, None before the first decision
    claims: SourceRecord | None = None  # acceptance of a model's fixed candidates, by the model's own probabilities
    pending: bool = False  # whether any of these drafts is still compared with the text
    made: list[ModelDraft] = field(default_factory=list)  # the model's drafts since its acceptance was last learned
    repetition: Repetition = field(default_factory=Repetition)  # whether the text repeats itself at present
    # moving averages of the expected net tokens of a search for text to copy: where the text does not repeat itself,
    # and where it does
    search_values: list[float] = field(default_factory=list)
    failures: int = 0  # searches since they were profitable on average
    next_search: float = 0  # step of the next one
    next_repeat: float = 0  # step from which a repetition is searched before that

    def searched_at(self, step: int) -> bool:
        """Returns whether text to copy is searched in a step."""
        repeats = self.repetition.now and (self.next_repeat <= step or self.repetition.began)
        return self.next_search <= step or (repeats and self.next_repeat < math.inf)


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """Requests for which a model may draft in a step."""

    contexts: Sequence[Context]  # the requests
    states: Sequence[ModelState]  # their states
    limits: Sequence[int]  # maximum number of draft tokens of each
    early: Sequence[bool]  # whether each request's drafts end where ``Context.end`` says
    missed: Sequence[float]  # seconds in which the model would process the tokens that it missed, of each
    size: int  # number of requests in the step, others included
    allowed: float  # seconds that the step may lose


class DraftPolicy(Controller):
    """Decides how much is drafted, down to nothing, by measured costs and acceptance.

    Sources that copy text are compared with the text that followed, verified or not, so they need no trials: while they
    find nothing profitable they are searched less often. A model that is not profitable gets a trial after a wait,
    which doubles after each trial that fails.

    Args:
        costs: Measured seconds.
        max_tokens: Largest number of draft tokens of a request.
    """

    costs: CostModel

    def __init__(self, costs: CostModel | None = None, max_tokens: int = 16) -> None:
        self.costs = costs or CostModel()
        self.tuning = self.costs.tuning
        self.bound(max_tokens)
        self.step = 0  # steps so far
        self._requests: dict[int, RequestDrafts] = {}
        self._survivals: dict[RequestKind, Survival] = {}
        self._rates: dict[RequestKind, Rates] = {}
        self._search_values = [0.1, 1.0]  # of new requests, see ``RequestDrafts``; high: an engine begins with searches
        self._failures = 0  # searches of the last requests since they were profitable on average
        self._wait = self.tuning.wait_steps  # steps before the first trial of a new request
        self._cooldown = 0  # step before which no trial is made, after one that failed
        self._worst = 0.0  # seconds that the model's drafts of a step lose if all are rejected
        self._usual = [0.0, 0.0]  # decayed sums over all steps: seconds that plain decoding would take, seconds
        self._priced: tuple[int, int, list[float], list[float]] = (0, 0, [], [])  # step, batch, seconds, prices
        self._budgets: list[int] = []
        self._drafted = False

    def bound(
        self, max_tokens: int, ledger: Ledger | None = None, memory: MemoryWatch | None = None, constant: bool = False
    ) -> None:
        """Sets the bounds on drafts, before any request.

        Args:
            max_tokens: Largest number of draft tokens of a request.
            ledger: Bounds the seconds that drafting may lose against plain decoding, None for no bound.
            memory: Bounds draft lengths while memory is short.
            constant: Drafts of models have the largest length that the ledger allows.
        """
        self.max_tokens, self.ledger, self.memory, self.constant = max_tokens, ledger, memory, constant

    def budgets(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> list[int]:
        self.step += 1
        limits = caps(contexts, max_draft_tokens, self.max_tokens, self.memory)
        due = any(budgets := requested(contexts, limits)) or not self.costs.plain_due(len(contexts))
        # One request's decision delays all requests, so a batch without drafts decides in one of a few steps.
        held = not self._drafted and len(contexts) > 1 and self.step % self.tuning.hold_steps != 0
        for i, context in enumerate(contexts) if due and not held else ():
            if context.depth is None and self._due(context, len(contexts)):
                budgets[i] = limits[i]
        self.resting = due and not any(budgets) and not self._drafted
        self.resting = self.resting and (held or self.step % self.tuning.wait_steps != 0)
        if self.resting:
            self.costs.displacement.since += 1
            if self.ledger:
                self.ledger.add(self.ledger.income(self.costs, len(contexts)))
        self._budgets = budgets
        return budgets

    def lengths(
        self, source: str, contexts: Sequence[Context], caps: Sequence[int], early: Sequence[bool], batch: int
    ) -> list[int]:
        """Returns the number of tokens that a model drafts for each request, at most ``caps[i]``.

        Args:
            source: Name of the model's source.
            contexts: The requests that may draft.
            caps: Draft tokens of each, at most.
            early: Whether its drafts for each end where ``Context.end`` says.
            batch: Number of requests in the step.
        """
        states = [self._model(source, context) for context in contexts]
        allowed = self._allowed(batch) - self.costs.displacement.tail * self.costs.plain_seconds(batch)
        if any(state.until <= self.step for state in states) or self._worst > allowed:
            for context in contexts:
                self._learn(context)
            missed = [self.costs.drafting.missed(context.missed_tokens) for context in contexts]
            self._decide(source, ModelBatch(contexts, states, caps, early, missed, batch, allowed))
        return [min(state.length, cap) for state, cap in zip(states, caps, strict=True)]

    def value(self, context: Context, covered: float = 0.0) -> float:
        """Returns the expected accepted tokens of a request's model, less their price, as last decided.

        Args:
            context: The request.
            covered: Probability that text that was copied makes the model's tokens unnecessary.
        """
        model = self._requests[context.id].model
        return math.inf if model is None or model.trial else model.value - covered * model.gain

    def searches(self, context: Context, batch: int) -> bool:
        """Returns whether the sources that copy text are searched for a request, in a step of ``batch`` requests."""
        return self._request(context).searched_at(self.step) and self._affords_search(batch)

    def keep(self, weights: Sequence[float], budget: int, batch: int) -> tuple[list[int], float]:
        """Returns the nodes of a merged draft that are verified, the best first, and their expected net tokens.

        Every number of nodes is evaluated, since eight rows may take as long as five, and nine much longer. Weights
        only fall along a path, and of equals the older node comes first, so that no node is kept without its parent.

        Args:
            weights: Probability that each node is accepted.
            budget: Number of nodes, at most.
            batch: Number of requests in the step.
        """
        seconds, prices = self._prices(batch)
        allowed, nodes = self._allowed(batch), sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
        best, count, tokens = self.tuning.margin_tokens, 0, 0.0
        for number, node in enumerate(nodes[: min(budget, len(prices) - 1)], 1):
            if seconds[number] > allowed:
                break
            tokens += weights[node]
            if tokens - prices[number] > best:
                best, count = tokens - prices[number], number
        return nodes[:count], best if count else 0.0

    def decision(self, sources: tuple[str, ...], candidates: int, expected: float, batch: int) -> Decision:
        """Returns the numbers behind a draft with ``sources`` by node; see ``Decision``."""
        prices = self._prices(batch)[1]
        price = prices[min(len(sources), len(prices) - 1)]
        return Decision(sources, candidates, expected, price, self._speedup())

    def searched(self, context: Context, value: float | None, batch: int) -> None:
        """Receives the expected net tokens of the text that a search found.

        Args:
            context: The request.
            value: These; None if there is nothing to search.
            batch: Number of requests in the step, which all wait for the search.
        """
        state, wait = self._request(context), self.tuning.wait_steps
        if value is None:
            state.next_search = state.next_repeat = math.inf
            return
        repeats = state.repetition.now
        for values, weight in (
            (state.search_values, 1.0 / wait),
            (self._search_values, 1.0 / self.tuning.memory_steps),
        ):
            values[repeats] += (value - values[repeats]) * weight
        price = self._speedup() * self._tokens_in(self.costs.search_seconds, batch)
        state.failures = self._failures = 0 if state.search_values[repeats] > price else state.failures + 1
        longest = max(wait, 4 * price / self.tuning.margin_tokens)  # steps: searches in vain cost a quarter of it
        state.next_repeat = self.step + min(2**state.failures, longest)
        if not repeats or not state.failures:
            state.next_search = self.step + min(2**state.failures, 8 * wait)

    def copy_record(self, context: Context, source: str) -> SourceRecord:
        """Returns the acceptance of a source that copies text, in one request."""
        state = self._request(context)
        records, state.pending = state.copies, True
        if source not in records:
            records[source] = SourceRecord(self._kind_rates(context, source).for_request(), copies=True)
        return records[source]

    def claim_record(self, context: Context, source: str) -> SourceRecord:
        """Returns the acceptance of a model's fixed candidates, in one request."""
        state = self._request(context)
        state.pending = True
        if state.claims is None:
            state.claims = SourceRecord(self._kind_rates(context, source).for_request(), copies=False)
        return state.claims

    def settle(self, context: Context) -> None:
        """Compares a request's drafts of fixed candidates with its text, which has grown."""
        state = self._requests.get(context.id)
        if state is None or not state.pending:
            return
        records = [*state.copies.values(), *([state.claims] if state.claims else [])]
        for record in records:
            record.settle(context.tokens)
            if record.copies and record.streak > 1:  # the text began to repeat
                state.next_search = min(state.next_search, self.step + 1)
        state.pending = any(record.open for record in records)

    def drafted(
        self,
        context: Context,
        source: str | None,
        requested: int,
        draft: Draft,
        verified: int | None = None,
        start: int | None = None,
    ) -> None:
        """Receives a model's draft. It is learned from when the next lengths are decided, not in each step: code that
        runs once in a step is mostly not in the processor's caches.

        Args:
            context: The request.
            source: Name of the model's source; None if its candidates are compared by ``claim_record``.
            requested: Number of tokens that the model was to draft.
            draft: The draft.
            verified: Number of its nodes that are verified, None for all.
            start: Number of tokens before it, None for all of the request's.
        """
        verified = len(draft) if verified is None else verified
        if not isinstance(draft.law, PointMass):  # the memory of its distributions is for the next step
            source = None if draft.scores is None else source
            draft = Draft(draft.ids, draft.parents, scores=draft.scores)
        start = len(context.tokens) if start is None else start
        made = ModelDraft(source, requested, verified, self.step, draft, start)
        self._requests[context.id].made.append(made)

    def _learn(self, context: Context) -> None:
        """Learns from a request's drafts by its model, as far as the text goes on."""
        request = self._requests[context.id]
        if not request.made or request.model is None:
            return
        for made in request.made:
            if made.source is not None:
                self.claim_record(context, made.source).add(made.draft, made.start)
            pending = PendingDraft(made.draft, made.start)
            if pending.follow(context.tokens):
                self._count(request.model, made, made.draft.path(pending.at))
        request.made.clear()
        self.settle(context)

    def _count(self, state: ModelState, made: ModelDraft, path: Sequence[int]) -> None:
        """Counts a draft of which the nodes ``path`` agree with the text."""
        tuning, requested = self.tuning, made.requested
        state.since = made.step
        if state.trial:
            success = 2 * len(path) >= requested and len(path) > state.value
            state.wait = 1 if success else min((32 * tuning.wait_steps), 2 * max(state.wait, tuning.wait_steps // 2))
            self._wait = tuning.wait_steps if success else min((32 * tuning.wait_steps) // 4, 2 * self._wait)
            self._cooldown = self.step + (0 if success else self._wait)
            state.until = 0
            if success:
                state.survival.discount(tuning.doubt_share)
        else:
            state.wait = self._wait = tuning.wait_steps
        state.survival.observe(requested, made.draft, path, made.verified)

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput]) -> None:
        self._drafted = any(len(step.draft) for step in steps)
        if self.ledger:
            self.ledger.observe(contexts, steps, self.costs)
        plain, total = self.costs.plain_seconds(len(steps)), steps[0].timings.total
        if plain and total and is_decode_only(steps):
            keep, tokens = 1.0 - 1.0 / self.tuning.shared_drafts, sum(len(step.tokens) for step in steps) / len(steps)
            self._usual = [keep * self._usual[0] + tokens * plain, keep * self._usual[1] + max(plain, total)]

    def describe(self) -> dict[str, Any]:
        kinds = [
            {
                "temperature": "zero" if greedy else "positive",
                "source": source,
                "predicted_output": predicted,
                "accepted": [round(float(p), 4) for p in survival.accepted()],
            }
            for (source, greedy, _, predicted), survival in self._survivals.items()
        ]
        return {
            "name": "fixed" if self.constant else "goodput",
            "max_tokens": self.max_tokens,
            "memory_halvings": halvings(self.memory),
            "budgets": list(self._budgets),
            "balance_seconds": None if self.ledger is None else self.ledger.balance,
            "acceptance": kinds,
        }

    @property
    def pause(self) -> str | None:
        if self._drafted or not self._budgets:
            return None
        if reason := short_of_memory(self.memory, self.max_tokens):
            return reason
        if self.ledger is not None and self.ledger.balance is not None and self.ledger.balance <= 0.0:
            return "drafting has lost as many seconds as it may"
        return "drafting is not profitable at the measured costs and acceptance"

    @property
    def num_known(self) -> int:
        """Number of requests with a state."""
        return len(self._requests)

    def forget(self, context: Context) -> None:
        if context.id in self._requests:
            self._learn(context)
            self.settle(context)
            del self._requests[context.id]

    def _request(self, context: Context) -> RequestDrafts:
        state = self._requests.get(context.id)
        if state is None:
            searched, failures = [*self._search_values], max(0, min(self._failures - 1, self.tuning.known_failures))
            state = self._requests[context.id] = RequestDrafts(search_values=searched, failures=failures)
        return state

    def _due(self, context: Context, batch: int) -> bool:
        """Returns whether any source may draft for a request in this step, after reading its new tokens."""
        state = self._request(context)
        model = state.model
        if state.next_repeat < math.inf:
            state.repetition.update(context.tokens)
        if model is not None and (model.length > 0 or model.until <= self.step):
            return True
        return state.searched_at(self.step) and self._affords_search(batch)

    def _tokens_in(self, seconds: float, batch: int) -> float:
        """Returns the number of tokens that plain decoding of ``batch`` requests yields in ``seconds``."""
        plain = self.costs.plain_seconds(batch)
        return seconds * batch / plain if plain else 0.0

    def _speedup(self) -> float:
        """Returns the usual speed, as a multiple of that of plain decoding."""
        plain, seconds = self._usual
        return max(1.0, plain / seconds) if seconds else 1.0

    def _kind(self, context: Context, source: str) -> RequestKind:
        return source, context.law.greedy, context.exactness, bool(context.prediction)

    def _kind_rates(self, context: Context, source: str) -> Rates:
        return self._rates.setdefault(self._kind(context, source), Rates())

    def _end(self, source: str, context: Context, minimum: Sequence[float]) -> ChainEnd:
        """Returns the end of a request's drafts, by the acceptance of a model's claims."""
        rates = self.claim_record(context, source).rates
        bases, slopes = zip(*(rates.line(cell) for cell in range(len(CLAIMS) + 1)), strict=True)
        return ChainEnd(CLAIMS, bases, slopes, minimum)

    def _model(self, source: str, context: Context) -> ModelState:
        state = self._request(context)
        if state.model is None:
            kind = self._kind(context, source)
            if kind not in self._survivals:
                self._survivals[kind] = Survival(self.max_tokens, memory=self.tuning.shared_drafts, tuning=self.tuning)
            survival = Survival(self.max_tokens, self._survivals[kind], tuning=self.tuning)
            state.model = ModelState(survival, self._wait, self.step)
        return state.model

    def _allowed(self, batch: int) -> float:
        """Returns the seconds that the step may lose."""
        return self.ledger.cap(self.costs, batch) if self.ledger else math.inf

    def _affords_search(self, batch: int) -> bool:
        """Returns whether a step may lose what a search takes, and a draft of what it finds."""
        worst = self._prices(batch)[0][: self.tuning.trial_tokens + 1][-1]
        return self._allowed(batch) > self.costs.search_seconds + worst

    def _prices(self, batch: int) -> tuple[list[float], list[float]]:
        """Returns the seconds of 0, 1, ... further rows for each request of a step, and their price in tokens."""
        step, size = self._priced[:2]
        if size != batch or self.step - step >= self.tuning.hold_steps:
            numbers, of_rows = range(self.max_tokens + 1), self.costs.step_seconds(batch)
            seconds = [of_rows(batch * (1.0 + number)) for number in numbers]
            added = list(accumulate([each - seconds[0] for each in seconds], max))
            plain = self.costs.plain_seconds(batch) or seconds[0]
            share = self._speedup() / plain if plain else 0.0
            prices = [share * more if share else self.tuning.row_share * rows for rows, more in enumerate(added)]
            self._priced = self.step, batch, added, prices
        return self._priced[2:]

    def _decide(self, source: str, requests: ModelBatch) -> None:
        """Sets the lengths of all requests for some steps, and makes a trial where one is due."""
        tuning, costs, contexts, limits = self.tuning, self.costs, requests.contexts, requests.limits
        for state, context in zip(requests.states, contexts, strict=True):
            hold = tuning.hold_steps if context.generated else 1
            state.length, state.value, state.trial, state.until = 0, 0.0, False, self.step + hold
        self._worst = 0.0
        if not costs.drafting.known:
            first = next((i for i, context in enumerate(contexts) if context.generated and limits[i]), None)
            if first is not None and requests.allowed > 0.0:
                self._try(requests.states[first], min(tuning.trial_tokens // 2, limits[first]))
            return
        if welcome := [i for i, limit in enumerate(limits) if limit and self._welcome(requests, i)]:
            self._allocate(source, requests, welcome)
        self._trial(requests, [i for i in welcome if not requests.states[i].length])

    def _allocate(self, source: str, requests: ModelBatch, welcome: Sequence[int]) -> None:
        """Sets the lengths of the requests ``welcome`` that are profitable."""
        states, early = requests.states, [requests.early[i] for i in welcome]
        candidates = LengthCandidates.of(
            [states[i].survival for i in welcome],
            [requests.limits[i] for i in welcome],
            [requests.missed[i] for i in welcome],
        )
        best = allocate(candidates, requests.size, self.costs, requests.allowed, self.constant, early)
        self._worst = best.worst
        for number, i in enumerate(welcome):
            states[i].length = best.lengths[number]
            states[i].gain, states[i].value = best.gains[number], best.values[number]
            requests.contexts[i].end = None
            if early[number] and best.lengths[number] and not self.constant:
                minimum = min_acceptance(best, number, requests.size, self.costs)
                requests.contexts[i].end = self._end(source, requests.contexts[i], minimum)

    def _trial(self, requests: ModelBatch, idle: Sequence[int]) -> None:
        """Makes a trial for the request that is due and missed fewest tokens, and sets when the others are due."""
        tuning, states = self.tuning, requests.states
        due = [i for i in idle if self.step - states[i].since > states[i].wait and self.step >= self._cooldown]
        if due:
            first = min(due, key=lambda i: requests.contexts[i].missed_tokens)
            allowed, limit = requests.allowed - self._worst, min(tuning.trial_tokens, requests.limits[first])
            if length := Worst(self.costs, requests.size).trial(limit, requests.missed[first], allowed):
                requests.contexts[first].end = None
                seconds = self.costs.drafting.seconds(length, 1) + self._prices(requests.size)[0][length]
                self._try(states[first], length, seconds)
            else:
                states[first].since = self.step
        if not any(state.length for state in states):
            for i in idle:
                left = max(states[i].since + states[i].wait, self._cooldown) - self.step
                states[i].until = self.step + max(tuning.hold_steps, min(left, (16 * tuning.hold_steps)))

    def _try(self, state: ModelState, length: int, seconds: float = 0.0) -> None:
        """Lets a request draft ``length`` tokens once, which take ``seconds``."""
        state.length, state.trial, state.until = length, True, self.step + 1
        state.value = self._tokens_in(seconds, 1)

    def _welcome(self, requests: ModelBatch, index: int) -> bool:
        """Returns whether a model may draft for a request: before its first token only if that hardly delays it."""
        if requests.contexts[index].generated:
            return True
        added = self.costs.drafting.seconds(requests.limits[index], 1) + requests.missed[index]
        return added <= self.tuning.first_token_steps * self.costs.plain_seconds(requests.size)
