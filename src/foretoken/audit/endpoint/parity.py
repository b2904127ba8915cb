"""Greedy parity: the same text with and without speculation, alone and in a crowd; and the same log-probabilities.

Every prompt is completed alone by plain decoding twice, by plain decoding in a crowd, and with speculation alone and in
a crowd. The plain texts show the distance between two passes of this server, which is the noise that may excuse a
divergence, and the effect of a batch without any speculation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from foretoken.audit.endpoint.distribution import TunedSampling
from foretoken.audit.endpoint.task import EndpointTask, Way, inconclusive, missing, unanswered
from foretoken.audit.equality import first_difference
from foretoken.audit.subject import Check, CheckOutcome
from foretoken.probe.answers import ServerAnswer, TokenPlace
from foretoken.probe.server import Side

NAME = "greedy parity"
LOGPROBS = "log-probabilities"
TIE = 1e-3  # difference of log-probabilities that rounding explains
_MAX_NOISE = 0.1  # difference, in nats, that passes over one and over several rows may have without being wrong
_PENALTY = 1.0  # presence and frequency penalty that changes greedy texts much
_LIKELY = -4.0  # log-probability of tokens that are compared


@dataclass(frozen=True, slots=True)
class TextDivergence:
    """The first token of a text that differs from the plain text."""

    prompt: int  # index
    position: int  # number of tokens before it
    way: str  # of generating the differing text
    margin: float | None  # of its token below the plain one, in nats
    kind: str  # "tie", "numeric noise", "bug", or "unexplained" without log-probabilities
    plain: str  # text
    speculative: str  # the other text

    def __str__(self) -> str:
        where = f"prompt {self.prompt + 1}, token {self.position + 1}, {self.way}: {self.kind}"
        return where if self.margin is None else f"{where}, {self.margin:.3g} nats below the likeliest"


@dataclass(slots=True)
class _Noise:
    """Distance of plain passes over one text. gap: between the best two tokens. logprob: of likely tokens."""

    gap: float = 0.0
    logprob: float = 0.0

    @classmethod
    def between(cls, plain: Sequence[ServerAnswer], *others: Sequence[ServerAnswer]) -> "_Noise":
        pairs = [pair for texts in others for pair in zip(plain, texts, strict=True)]
        places = [place for here, there in pairs for place in common(here, there)]
        gap = max((_gap_change(a, b) for a, b in places), default=0.0)
        return cls(gap, max((_apart(a, b) for a, b in places), default=0.0))


def parity(task: EndpointTask) -> list[Check]:
    """Compares greedy texts and their log-probabilities."""
    if task.plain is None:
        why = "there is nothing to compare with; name a server without speculation by --baseline"
        return [inconclusive(NAME, why)]
    texts = {
        "plain, alone": task.greedy(task.plain),
        "plain, again": task.greedy(task.plain, Way.AGAIN),
        "plain, in a crowd": task.greedy(task.plain, Way.CROWD),
        Way.ALONE: task.greedy(task.speculative),
        Way.CROWD: task.greedy(task.speculative, Way.CROWD),
    }
    every = [reply for replies in texts.values() for reply in replies]
    if reasons := missing(every):
        return [unanswered(NAME, reasons, len(every))]
    answers = {way: [reply for reply in replies if isinstance(reply, ServerAnswer)] for way, replies in texts.items()}
    placed = {way: [_placed(task, text) for text in row] for way, row in answers.items()}
    plain = placed.pop("plain, alone")
    noise = _Noise.between(plain, placed["plain, again"], placed["plain, in a crowd"])
    noise.gap = max(noise.gap, min(_Noise.between(plain, placed[Way.ALONE]).gap, _MAX_NOISE))
    if plain != answers["plain, alone"]:  # a checkpoint does not show the distance between the server's passes
        # Plain greedy tokens are the likeliest but for rounding, which is that of two passes.
        places = [place for text in plain for place in text.places if place.top and place.logprob is not None]
        below = max((place.top[0][1] - (place.logprob or 0.0) for place in places), default=0.0)
        noise.gap = max(_MAX_NOISE, below)
    divergences = [one for way, others in placed.items() for one in _divergences(plain, others, way, noise)]
    divergences += _penalized(task, task.plain, noise)
    return [_verdict(plain, divergences, noise, task), _logprobs(answers["plain, alone"], answers[Way.ALONE], noise)]


def _placed(task: EndpointTask, text: ServerAnswer) -> ServerAnswer:
    """Returns a text with the checkpoint's log-probabilities, if there is one and the server reports none."""
    if task.checkpoint is None or any(place.top for place in text.places):
        return text
    places = task.checkpoint.places(text)
    return replace(text, places=places) if isinstance(places, tuple) else text


def _penalized(task: EndpointTask, plain: Side, noise: _Noise) -> list[TextDivergence]:
    """Compares texts with penalties, whose tokens depend on those before them in the same step.

    Servers that refuse or ignore penalties are skipped: the check of parameters names them.
    """
    tuning = TunedSampling(presence_penalty=_PENALTY, frequency_penalty=_PENALTY, window=plain.dialect.window)
    options = {"presence_penalty": _PENALTY, "frequency_penalty": _PENALTY}
    sides = [task.greedy(side, Way.PENALIZED, **options) for side in (plain, task.speculative)]
    here, there = ([_placed(task, reply) for reply in replies if isinstance(reply, ServerAnswer)] for replies in sides)
    if len(here) < task.sizes.parity_prompts or len(there) < len(here):
        return []
    return list(_divergences(here, there, Way.PENALIZED, noise, tuning))


def common(here: ServerAnswer, there: ServerAnswer) -> Iterator[tuple[TokenPlace, TokenPlace]]:
    """Yields the positions of two texts that have one history, up to their first difference."""
    for a, b in zip(here.places, there.places, strict=False):
        if a.top and b.top:
            yield a, b
        if a.token != b.token:
            return


def _gap_change(here: TokenPlace, there: TokenPlace) -> float:
    """Returns the change of the distance between the best two tokens."""
    if len(here.top) < 2:
        return 0.0
    (best, one), (second, two) = here.top[:2]
    other = dict(there.top)
    return abs((one - two) - (other[best] - other[second])) if best in other and second in other else 0.0


def _apart(here: TokenPlace, there: TokenPlace) -> float:
    """Returns the largest difference of a likely token's log-probability."""
    other = dict(there.top)
    return max((abs(value - other[name]) for name, value in here.top if value > _LIKELY and name in other), default=0.0)


def _divergences(
    plain: Sequence[ServerAnswer],
    others: Sequence[ServerAnswer],
    way: str,
    noise: _Noise,
    tuning: TunedSampling | None = None,
) -> Iterator[TextDivergence]:
    for index, (here, there) in enumerate(zip(plain, others, strict=True)):
        placed = bool(here.places and there.places)
        at = first_difference(here.names, there.names) if placed else first_difference(here.text, there.text)
        if at is None and (here.text, here.finish) == (there.text, there.finish):
            continue
        at = len(here.names) if at is None else at
        margin = _margin(here, there, at, tuning) if placed else None
        if margin is None:
            kind = "bug" if placed else "unexplained"
        else:
            kind = "tie" if margin <= TIE else "numeric noise" if margin <= 2.0 * noise.gap else "bug"
        yield TextDivergence(index, at, way, margin, kind, here.text, there.text)


def _margin(here: ServerAnswer, there: ServerAnswer, at: int, tuning: TunedSampling | None) -> float | None:
    """Returns the distance of the other text's token below the likeliest one, in the plain pass under ``tuning``."""
    if at >= len(here.places) or not here.places[at].top:
        return None
    top, before = here.places[at].top, [place.token for place in here.places[:at]]
    scores = [value for _, value in top]
    if tuning is not None:
        scores = tuning.scores(top, tuple(map(str, here.prompt_ids)), before)
    named = there.places[at].token if at < len(there.places) else None
    score = next((score for (name, _), score in zip(top, scores, strict=True) if name == named), min(scores))
    return max(scores) - score


def _verdict(
    plain: Sequence[ServerAnswer], divergences: Sequence[TextDivergence], noise: _Noise, task: EndpointTask
) -> Check:
    speculative = [one for one in divergences if not one.way.startswith("plain")]
    batch = [one for one in divergences if one.way.startswith("plain")]
    tokens = sum(len(text.names) for text in plain)
    numbers = {
        "texts": len(plain),
        "tokens": tokens,
        "noise": noise.gap,
        "divergences": [asdict(one) | {"tie": one.kind != "bug"} for one in speculative[:20]],
        "plain_divergences": len(batch),
    }
    compared = f"{len(plain)} prompts, {tokens:,} tokens, alone and {task.concurrency} at a time"
    bugs = [one for one in speculative if one.kind == "bug"]
    unstable = [one for one in batch if one.kind == "bug"]
    unknown = [one for one in speculative if one.kind == "unexplained"]
    apart = f"; two passes lie up to {noise.gap:.2g} nats apart"
    alone_wrong = any(one.way == Way.ALONE for one in bugs) and all(one.way == "plain, in a crowd" for one in unstable)
    if bugs and (alone_wrong or not unstable):
        many = f"{len(bugs)} texts differ from the plain ones by more than noise ({compared})"
        return Check(NAME, CheckOutcome.FAILED, f"{many}; first: {bugs[0]}{apart}", numbers)
    if bugs:
        return inconclusive(NAME, f"plain decoding differs from itself as well; first: {unstable[0]}", numbers)
    if unknown:
        why = f"{len(unknown)} texts differ and the server gives no log-probabilities to say why"
        return inconclusive(NAME, f"{why}; first: {unknown[0]}", numbers)
    evidence = f"the plain text: {compared}"
    if divergences:
        ways = dict.fromkeys(one.way for one in divergences)
        differing = ", ".join(f"{sum(one.way == way for one in divergences)} {way}" for way in ways)
        kinds = " and ".join(dict.fromkeys(one.kind for one in divergences))
        evidence = f"{compared}; texts that differ, by {kinds}: {differing}{apart}"
    return Check(NAME, CheckOutcome.PASSED, evidence, numbers)


def _logprobs(plain: Sequence[ServerAnswer], others: Sequence[ServerAnswer], noise: _Noise) -> Check:
    """Compares the log-probabilities that come with plain and with speculative texts."""
    given = sum(bool(place.top) for text in plain for place in text.places)
    if not given:
        return Check(LOGPROBS, CheckOutcome.SKIPPED, "the server gives none")
    without = sum(not place.top for text in others for place in text.places) + sum(not text.places for text in others)
    tolerance = max(_MAX_NOISE, 3.0 * noise.logprob)
    pairs = [pair for here, there in zip(plain, others, strict=True) for pair in common(here, there)]
    largest = max((_apart(a, b) for a, b in pairs), default=0.0)
    numbers = {"tokens": len(pairs), "largest": largest, "tolerance": tolerance, "without": without}
    if without:
        evidence = f"with speculation {without} tokens or texts have none, without it {given} tokens do"
        return Check(LOGPROBS, CheckOutcome.FAILED, evidence, numbers)
    evidence = f"up to {largest:.2g} nats apart with and without speculation, {tolerance:.2g} allowed"
    return Check(LOGPROBS, CheckOutcome.FAILED if largest > tolerance else CheckOutcome.PASSED, evidence, numbers)
