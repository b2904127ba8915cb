"""``plan_endpoint``: plans the speculation of an OpenAI-compatible server from outside."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from foretoken.core.checks import integer
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.core.progress import Say
from foretoken.plan.endpoint.drafters import LocalModels, PredictedDrafter, copying, predicted_drafters, texts_of
from foretoken.plan.endpoint.outcome import EndpointPlan, EndpointPredictor, paste
from foretoken.plan.endpoint.statistics import (
    AGREE,
    EndpointAcceptance,
    PassSeconds,
    SpeedModel,
    TokensPerPass,
    measured_plain,
    measured_speculative,
)
from foretoken.probe.answers import Refused
from foretoken.probe.client import Journal
from foretoken.probe.server import CannotTellError, ServerPair, Side, all_probed
from foretoken.probe.workload import Measurement, Wave, WaveSender, draft_length, sides_of

CONCURRENCY = (1, 4, 16)
Announce = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class PlannedEndpoint:
    """The server to plan for, and the settings of the measurement."""

    pair: ServerPair  # the server, with and without speculation
    depth: int | None = None  # its draft length, None to find it out
    temperature: float = 0.0
    concurrency: Sequence[int] = CONCURRENCY  # numbers of requests at once
    max_tokens: int = 64  # of every answer
    budget: int | None = None  # generated tokens to spend, about
    seconds: float | None = None  # time to take, about, in place of ``budget``
    current: Mapping[str, Any] = field(default_factory=dict)  # the server's speculative_config, as far as it is known
    models: LocalModels = field(default_factory=LocalModels)  # to predict drafters that are models
    earlier: Sequence[Mapping[str, Any]] = ()  # records of plans for the same server at other draft lengths
    journal: Path | None = None  # file of the waves of an unfinished plan

    def __post_init__(self) -> None:
        integer("the draft length", self.depth, 1, optional=True)
        if not self.concurrency or min(self.concurrency) < 1:
            raise InvalidRequest(f"--concurrency must be numbers of at least 1, got {list(self.concurrency)}")
        if self.max_tokens < 16:
            raise InvalidRequest(f"max_tokens must be at least 16 to time passes, got {self.max_tokens}")


def plan_endpoint(
    endpoint: PlannedEndpoint,  # the server and the settings
    prompts: Sequence[str],  # texts like the user's
    announce: Announce = lambda costs: True,  # called with the costs before they are spent; returns whether to continue
    say: Say = lambda stage, fraction: None,  # reports progress
) -> EndpointPlan:
    """Measures a server and predicts.

    Raises:
        ForetokenError: The server refuses the key or the model.
        InvalidRequest: The budget is too small.
        ModelLoadError: A checkpoint cannot be loaded.
    """
    started, journal = monotonic(), Journal(Wave, endpoint.journal)
    planning = _Planning(endpoint, prompts, announce, say, journal)
    finished = False
    try:
        result = planning.run()
        finished = not planning.later and bool(result.because or result.rows)
    finally:
        journal.close(finished)
    planning.facts["seconds"] = round(monotonic() - started, 1)
    return result


@dataclass
class _Planning:
    """One run of ``plan_endpoint``. later: whether the plan failed for a reason that may pass."""

    endpoint: PlannedEndpoint
    prompts: Sequence[str]
    announce: Announce
    say: Say
    journal: Journal[Wave]
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    later: bool = False

    def run(self) -> EndpointPlan:
        """Returns the plan, or the reason why there is none."""
        pair = self.endpoint.pair
        self.facts |= {"endpoint": pair.url, "baseline": pair.baseline, "model": pair.model}
        try:
            plain, speculative = self._sides()
            self.facts["engine"] = str(speculative.dialect.kind)
            result = self._planned(plain, speculative)
            self.facts["spent"] = {side.name: asdict(side.client.spent) for side in (plain, speculative)}
            return result
        except CannotTellError as error:
            self.later = error.later
            return EndpointPlan(self.facts, str(error), tuple(self.notes))

    def _sides(self) -> tuple[Side, Side]:
        usable = all_probed(self.endpoint.pair.sides(), self.prompts[0], logprobs=False)
        if len(usable) < 2:
            raise CannotTellError(
                f"there is no plain decoding to compare with: {usable[0].dialect.kind} has no switch for a request; "
                "give the same model without speculation as --baseline"
            )
        return usable[0], usable[1]

    def _planned(self, plain: Side, speculative: Side) -> EndpointPlan:
        end, patience = self.endpoint, self.endpoint.pair.patience
        sender = WaveSender(self.journal, end.max_tokens, end.temperature, patience.retries, patience.pause)
        self.say("finding out the draft length", 0.0)
        waves = []
        for i, prompt in enumerate(self.prompts[:2]):
            wave = sender.send(speculative, [prompt], f"probe/{i}")
            if not isinstance(wave, Wave):
                hint = "; it must stream" if isinstance(wave, Refused) else ""
                raise CannotTellError(f"the server does not stream a text: {wave.why}{hint}", later=True)
            waves.append(wave)
        depth = end.depth or draft_length(speculative, waves)
        sides = sides_of(plain, speculative, depth)
        self.facts |= {"depth": depth, "temperature": end.temperature, "max_tokens": end.max_tokens}
        self.facts["plain_by"] = plain.switch or "baseline"
        measurement = Measurement(sender, sides, self.prompts, sorted(set(end.concurrency)))
        if end.budget is not None:
            measurement.rounds(end.budget, None, 0.0)  # refused before more is spent
        seconds = measurement.warm_up()
        rounds = measurement.rounds(end.budget, end.seconds, seconds)
        self.facts["costs"] = costs = measurement.costs(rounds, seconds)
        if not self.announce(costs):
            return EndpointPlan(self.facts)
        measurement.run(rounds, self.say)
        self.notes += measurement.notes
        return self._plan_from(measurement)

    def _plan_from(self, measured: Measurement) -> EndpointPlan:
        plain, depths = measured.of(0), [side.depth for side in measured.sides if side.depth]
        acceptances = {depth: EndpointAcceptance.of(depth, plain, measured.of(depth)) for depth in depths}
        for acceptance in acceptances.values():
            acceptance.check()
        here = {at: EndpointAcceptance.of(at[0], plain, waves) for at, waves in measured.waves.items() if at[0]}
        apart, speeds = _apart(here, acceptances), self._speeds(measured, here, acceptances)
        self.facts["tokens_per_pass_from"] = acceptances[max(acceptances)].source
        self.notes += [
            f"other draft lengths are skipped, because the server drafts {each.shorter:.1f} tokens a step "
            f"where its draft length is {depth}"
            for depth, each in acceptances.items()
            if each.shorter
        ]
        kind = measured.sides[1].dialect.kind
        drafters = self._drafters(measured, kind)
        predictor = EndpointPredictor(acceptances, speeds, drafters, sorted(speeds.plain), apart)
        rows = predictor.rows()
        self.notes += [predictor.skipped] if predictor.skipped else []
        choice = predictor.choice(rows)
        depth, config = (0, None) if choice.row is None else (choice.row.depth, choice.row.config)
        lines = paste(kind, config, depth, choice.limit, self.endpoint.current)
        return EndpointPlan(
            self.facts, "", tuple(self.notes), tuple(rows), choice, tuple(lines), _points(speeds), predictor
        )

    def _speeds(
        self,
        measured: Measurement,
        here: Mapping[tuple[int, int], EndpointAcceptance],
        acceptances: Mapping[int, EndpointAcceptance],
    ) -> SpeedModel:
        """Returns the seconds of passes. here: acceptance by draft length and concurrency."""
        each = {number: measured_plain(measured.waves[0, number]) for number in measured.measured}
        plain = {number: seconds for number, seconds in each.items() if seconds is not None}
        speculative: dict[tuple[int, int], PassSeconds] = {}
        for (depth, number), waves in measured.waves.items():
            if not depth or number not in plain:
                continue
            one, beside = here[depth, number], measured.waves[0, number]
            tokens = one.counted or one.seen or acceptances[depth].at(depth).mean
            bursts = 1.0 / (1.0 + one.merged) if one.texts else None
            if seconds := measured_speculative(waves, beside, plain[number], tokens, bursts):
                speculative[depth, number] = seconds
        for record in self.endpoint.earlier:
            speculative |= _earlier(record, self.facts, plain, speculative)
        return SpeedModel(plain, speculative)

    def _drafters(self, measured: Measurement, kind: str) -> list[PredictedDrafter]:
        self.say("other drafters on the texts", 1.0)
        try:
            texts = texts_of(measured.sides[0], *measured.plain_answers, self.endpoint.max_tokens)
            return predicted_drafters(texts, self.endpoint.temperature, copying(kind), self.endpoint.models)
        except CannotTellError as error:
            self.notes.append(str(error))
            return []


def _apart(
    here: Mapping[tuple[int, int], EndpointAcceptance], acceptances: Mapping[int, EndpointAcceptance]
) -> dict[tuple[int, int], TokensPerPass]:
    """Returns tokens per pass by draft length and concurrency, if they differ from those of all concurrencies.

    Raises CannotTellError if they differ so much that one acceptance for all concurrencies is wrong.
    """
    apart = {}
    for (depth, number), acceptance in here.items():
        ratio = acceptance.differs(acceptances[depth])
        if ratio is None:
            continue
        if not 1 / AGREE < ratio < AGREE:
            raise CannotTellError(
                f"tokens per pass depend on the concurrency: at {number} requests at once they are {ratio:.2f} "
                "times those of all together; plan for each --concurrency alone"
            )
        apart[depth, number] = acceptance.at(depth)
    return apart


def _points(speeds: SpeedModel) -> dict[str, Any]:
    """Returns the measured points for JSON: (concurrency, seconds, width), and (depth, those, tokens per pass)."""
    return {
        "plain": [[number, each.seconds, each.width] for number, each in speeds.plain.items()],
        "speculative": [
            [depth, number, each.seconds, each.width, each.tokens]
            for (depth, number), each in speeds.speculative.items()
            if each.tokens is not None
        ],
    }


def _earlier(
    record: Mapping[str, Any],
    facts: Mapping[str, Any],
    plain: Mapping[int, PassSeconds],
    known: Mapping[tuple[int, int], PassSeconds],
) -> dict[tuple[int, int], PassSeconds]:
    """Returns the points of an earlier plan at concurrencies of this one, scaled to the plain speed of today.

    Raises ForetokenError if it is no record of a plan for a server, or one of another model or setting.
    """
    try:
        points, setting = record["measured"], record["setting"]
        other = [key for key in ("model", "temperature", "max_tokens") if setting.get(key) != facts[key]]
        then = {int(number): float(seconds) for number, seconds, _ in points["plain"]}
        scaled = {
            (int(depth), int(number)): PassSeconds(
                float(seconds) * plain[int(number)].seconds / then[int(number)], float(width) * 2**0.5
            )
            for depth, number, seconds, width, _ in points["speculative"]
            if int(number) in plain and (int(depth), int(number)) not in known
        }
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ForetokenError("--with needs records that plan --endpoint wrote with --output") from error
    if other:
        listed = ", ".join(f"{key} {setting.get(key)} instead of {facts[key]}" for key in other)
        raise ForetokenError(f"--with needs a record of the same server and setting, but it has {listed}")
    timed = all(0.0 < each.seconds < math.inf and 0.0 <= each.width < math.inf for each in scaled.values())
    if not timed or any(depth < 1 for depth, _ in scaled):
        raise ForetokenError("--with needs records with draft lengths of at least 1 and positive, finite times")
    return scaled
