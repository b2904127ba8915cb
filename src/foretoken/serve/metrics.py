"""Statistics of the server: speculation of each request, and Prometheus metrics of all requests."""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import Response

from foretoken.core.step import PositionCounts, StepOutput
from foretoken.core.verdict import KINDS
from foretoken.engine.scheduler import SchedulerUsage
from foretoken.outputs import SpeculationStats
from foretoken.serve.request_state import RequestSummary
from foretoken.serve.token_text import PHASES

PREFIX = "foretoken:"
FINISH_REASONS = ("stop", "length", "abort", "error", *KINDS)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_TOKENS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token, its wait included.", _SECONDS),
    "inter_token_latency_seconds": ("Time between steps over the tokens of the later one, once a token.", _SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", _SECONDS),
    "request_queue_time_seconds": ("From a request's arrival until the engine took it up.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of finished requests.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of finished requests.", _TOKENS),
}
_REMEMBERED = 65_536  # sequences whose last step is remembered; aborted ones are evicted in time


@dataclass(slots=True)
class SpeculationRecord:
    """Statistics of one request's speculation, in vLLM's format.

    Steps without a draft are not counted. Accepted tokens are draft tokens that were emitted, without those that a stop
    string cuts off an accepted block. Every node of a draft tree counts as drafted.
    """

    num_spec_tokens: int = 0  # configured draft tokens per step, if known. A longer draft raises it
    _accepted: list[int] = field(default_factory=list)
    _drafted: list[int] = field(default_factory=list)

    def add(self, step: StepOutput) -> None:
        """Counts one step unless it has no draft."""
        if len(step.draft):
            self._accepted.append(step.accepted)
            self._drafted.append(len(step.draft))

    def to_dict(self, detailed: bool = False) -> dict[str, Any]:
        """Returns the object ``metrics.speculative_decoding`` of an answer, with vLLM's names and meanings.

        docs/reference/metrics.md describes its fields. ``detailed`` adds one integer for each step.
        """
        steps, drafted, accepted = len(self._drafted), sum(self._drafted), sum(self._accepted)
        stats = SpeculationStats(drafts=steps, drafted=drafted, accepted=accepted)
        longest = max(self.num_spec_tokens, *self._drafted, 0)
        by_length = {k: [0] * (k + 1) for k in sorted(set(self._drafted))}
        for k, j in zip(self._drafted, self._accepted, strict=True):
            by_length[k][j] += 1
        counts = Counter(self._accepted)
        record: dict[str, Any] = {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": [counts[j] for j in range(longest + 1)],
            "acceptance_histogram_by_draft_length": {str(k): row for k, row in by_length.items()},
            "num_spec_steps": steps,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_spec_tokens": longest,
        }
        if detailed:
            record |= {"per_step_accepted": list(self._accepted), "per_step_drafted": list(self._drafted)}
        return record


@dataclass(slots=True)
class _Histogram:
    """Counts of values up to each bound; the last count has no bound. They are summed up when shown."""

    bounds: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        labels, so_far, buckets = [*map(str, self.bounds), "+Inf"], 0, []
        for label, count in zip(labels, self.counts, strict=True):
            so_far += count
            buckets.append((label, float(so_far)))
        return buckets


@dataclass(slots=True)
class _Speculation:
    """Counts of one method: steps with a draft, their tokens, and the positions that were verified and accepted."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: PositionCounts = field(default_factory=lambda: PositionCounts([0.0], [0.0]))

    def add(self, step: StepOutput) -> None:
        path, accepted = step.verdict.path, step.accepted
        refused = accepted == len(path) and (path[-1] if path else -1) in step.draft.parents
        self.drafts += 1
        self.drafted += len(step.draft)
        self.accepted += accepted
        self.verified.add(accepted + refused, accepted)

    @property
    def reached(self) -> list[float]:
        """Number of drafts that were accepted at each position or beyond, up to the last that any reached."""
        counts = self.verified.accepted
        return [count for position, count in enumerate(counts) if count or not position]


class MetricsPage(Collector):
    """Metrics of one page for Prometheus."""

    def render(self) -> Response:
        """Returns the answer of ``GET /metrics``."""
        return Response(generate_latest(self), headers={"Content-Type": CONTENT_TYPE_LATEST})


class Metrics(MetricsPage):
    """Prometheus metrics of one server. docs/reference/metrics.md lists them.

    The engine's thread counts and another thread reads; a lock makes each step atomic.
    """

    def __init__(
        self,
        model_name: str,  # label of all metrics
        usage: Callable[[], SchedulerUsage],  # returns the load of the engine; called when metrics are read
        method_of: Callable[[StepOutput], str],  # returns the method that drafted in a step, for the label ``method``
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._usage, self._method_of, self._clock = model_name, usage, method_of, clock
        self._lock = threading.Lock()
        self._prompt_tokens = self._generation_tokens = self._steps = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._unknown_fields: Counter[str] = Counter()  # by path
        self._finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._speculation: dict[str, _Speculation] = defaultdict(_Speculation)
        self._alarms: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._last: dict[int, float] = {}  # time of each sequence's last tokens, the latest last

    def on_steps(self, steps: Sequence[StepOutput]) -> None:
        """Counts one decode step, by its part in each sequence."""
        if not steps:
            return
        now, gaps, timings = self._clock(), self._histograms["inter_token_latency_seconds"], steps[0].timings
        with self._lock:
            self._steps += 1
            for phase in self._seconds:
                self._seconds[phase] += getattr(timings, phase)
            for step in steps:
                if step.alarm is not None:
                    self._alarms[step.alarm] += 1
                if len(step.draft):
                    self._speculation[self._method_of(step)].add(step)
                if step.tokens:
                    self._generation_tokens += len(step.tokens)
                    before = self._last.pop(step.sequence, None)
                    if before is not None:
                        gaps.observe((now - before) / len(step.tokens), len(step.tokens))
                    self._last[step.sequence] = now
                if step.finish_reason is not None:
                    self._last.pop(step.sequence, None)
            while len(self._last) > _REMEMBERED:
                del self._last[next(iter(self._last))]

    def on_unknown_fields(self, path: str, count: int) -> None:
        """Counts fields of a request that are not known and were ignored. path: of the endpoint."""
        with self._lock:
            self._unknown_fields[path] += count

    def on_first_token(self, seconds: float) -> None:
        """Counts a request's first token, ``seconds`` after its arrival."""
        with self._lock:
            self._histograms["time_to_first_token_seconds"].observe(seconds)

    def on_finished(self, reason: str, request: RequestSummary) -> None:
        """Counts a finished request. reason: one of ``FINISH_REASONS``."""
        with self._lock:
            self._finished[reason] += 1
            self._prompt_tokens += request.prompt_tokens
            self._histograms["request_prompt_tokens"].observe(request.prompt_tokens)
            self._histograms["request_generation_tokens"].observe(request.completion_tokens)
            self._histograms["e2e_request_latency_seconds"].observe(request.seconds)
            if request.queue_seconds is not None:
                self._histograms["request_queue_time_seconds"].observe(request.queue_seconds)

    def acceptance(self) -> dict[str, Any]:
        """Returns drafts, tokens and acceptance of each method, as JSON.

        ``per_position`` has the share of drafts that were accepted at least that far, ``conditional`` the share of
        those accepted up to a position, with a token there, in which it was accepted as well.
        """
        methods = {}
        with self._lock:
            for method, kept in self._speculation.items():
                stats = SpeculationStats(drafts=kept.drafts, drafted=kept.drafted, accepted=kept.accepted)
                methods[method] = {
                    "num_drafts": kept.drafts,
                    "num_draft_tokens": kept.drafted,
                    "num_accepted_tokens": kept.accepted,
                    "mean_acceptance_length": stats.mean_acceptance_length,
                    "draft_acceptance_rate": stats.draft_acceptance_rate,
                    "per_position": [count / max(1, kept.drafts) for count in kept.reached],
                    "conditional": [a / v for a, v in zip(kept.reached, kept.verified.drafted, strict=False) if v],
                }
        return methods

    def collect(self) -> Iterator[Metric]:
        """Returns all metrics."""
        usage = self._usage()
        with self._lock:
            families = [*self._engine(usage), *self._counted(), *self._speculated(), *self._distributions()]
        return iter(families)

    def _engine(self, usage: SchedulerUsage) -> Iterator[Metric]:
        usage_share = usage.kv_tokens / usage.kv_capacity if usage.kv_capacity else 0.0
        bytes_per_token = usage.kv_bytes_per_token
        yield self._gauge("num_requests_running", "Running sequences.", usage.running)
        yield self._gauge("num_requests_waiting", "Waiting sequences.", usage.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", usage_share)
        yield self._gauge("kv_cache_tokens", "Tokens in the KV cache.", usage.kv_tokens)
        yield self._gauge("kv_cache_bytes_per_token", "Bytes of one token in the target's KV cache.", bytes_per_token)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", usage.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", usage.prefix_hits)
        yield self._counter("num_preemptions", "Preempted sequences.", usage.preemptions)

    def _counted(self) -> Iterator[Metric]:
        unknown = self._unknown_fields
        yield self._counter("prompt_tokens", "Prompt tokens of finished requests.", self._prompt_tokens)
        yield self._counter("generation_tokens", "Tokens emitted.", self._generation_tokens)
        yield self._counter("request_success", "Finished requests.", self._finished, "finished_reason")
        yield self._counter("unknown_request_fields", "Unknown fields that were ignored.", unknown, "endpoint")
        yield self._counter("steps", "Decode steps, each with one forward pass of the target.", self._steps)
        yield self._counter("step_seconds", "Seconds of decode steps, by phase.", self._seconds, "phase")

    def _speculated(self) -> Iterator[Metric]:
        methods = self._speculation.items()
        drafts = {method: kept.drafts for method, kept in methods}
        drafted = {method: kept.drafted for method, kept in methods}
        accepted = {method: kept.accepted for method, kept in methods}
        reached = {(m, str(i)): n for m, kept in methods for i, n in enumerate(kept.reached)}
        verified = {(m, str(i)): n for m, kept in methods for i, n in enumerate(kept.verified.drafted)}
        name, labels, at = "spec_decode_num_", ("method", "position"), "Drafts that were verified at this position."
        yield self._counter(name + "drafts", "Drafts that were verified, one a sequence and step.", drafts, "method")
        yield self._counter(name + "draft_tokens", "Tokens drafted.", drafted, "method")
        yield self._counter(name + "accepted_tokens", "Drafted tokens emitted.", accepted, "method")
        yield self._counter(name + "accepted_tokens_per_pos", "Drafts accepted that far.", reached, *labels)
        yield self._counter(name + "verified_tokens_per_pos", at, verified, *labels)
        alarms = self._alarms
        yield self._counter("spec_decode_alarms", "Long runs of one sequence's drafts of this kind.", alarms, "kind")

    def _distributions(self) -> Iterator[Metric]:
        for name, kept in self._histograms.items():
            family = HistogramMetricFamily(PREFIX + name, _HISTOGRAMS[name][0], labels=["model_name"])
            family.add_metric([self._model], kept.cumulative(), kept.total)
            yield family

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, meaning: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        """Returns a counter. values: by the value of its label, or by those of its labels."""
        family = CounterMetricFamily(PREFIX + name, meaning, labels=["model_name", *labels])
        for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric([self._model, *((key,) if isinstance(key, str) else key)], value)
        return family


class MergedMetrics(MetricsPage):
    """Metrics of several engines, whose samples differ in a label, and ``others`` that no engine has."""

    def __init__(self, engines: Iterable[Iterable[Metric]], others: Iterable[Metric] = ()) -> None:
        self._engines, self._others = engines, others

    def collect(self) -> Iterator[Metric]:
        """Returns every family once."""
        merged: dict[str, Metric] = {}
        for family in chain.from_iterable(self._engines):
            combined = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            combined.samples.extend(family.samples)
        return chain(self._others, merged.values())


def replica_metrics(families: Mapping[str, Iterable[Metric]], failovers: Mapping[str, int]) -> MergedMetrics:
    """Returns the metrics of all replicas by name, and the number of requests that continued on another by outcome."""
    count = GaugeMetricFamily(PREFIX + "replicas", "Replicas that answer.", value=len(families))
    continued = CounterMetricFamily(
        PREFIX + "failovers", "Requests whose replica was lost, by outcome.", labels=["outcome"]
    )
    for outcome, number in failovers.items():
        continued.add_metric([outcome], number)
    labelled = []
    for replica, metrics in sorted(families.items()):
        for family in metrics:
            copy = Metric(family.name, family.documentation, family.type)
            copy.samples = [s._replace(labels={**s.labels, "replica": replica}) for s in family.samples]
            labelled.append(copy)
    return MergedMetrics([labelled], (count, continued))
