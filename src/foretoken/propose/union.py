"""The union of several sources: text that can be copied, and at most one model, merged into one tree by the policy.

Sources of fixed candidates join one tree with shared prefixes, of which the policy keeps the profitable nodes. A chain
of sampled tokens has a distribution of its own and takes the place of the tree: before it is sampled, the policy
compares what it expects of both. A union of one source is that source under the policy.

Two methods are unions: "auto", the default, of the sources that need no model, with the draft or heads if there are
any; and "mixture", of any sources.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foretoken.control.policy import DraftPolicy
from foretoken.core.artifacts import heads_method
from foretoken.core.checks import integer
from foretoken.core.context import Context
from foretoken.core.draft import Decision, Draft, log_scores
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Scores
from foretoken.models.formats.checkpoint import load_config, resolve
from foretoken.propose.base import BuildContext, Method, Needs, Observation, Proposer
from foretoken.propose.growers import is_drawn


@dataclass(eq=False, slots=True)
class DraftUnion:
    """A merged tree. Nodes are in the order of insertion, so parents come before children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # P(node accepted | its parent accepted)
    owners: list[str] = field(default_factory=list)  # the proposer with the highest rate for each node
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # by parent and token

    def add(self, draft: Draft, rates: Sequence[float], owner: str) -> list[int]:
        """Adds a draft of fixed candidates.

        Returns the index in the union of each node of the draft.
        rates: P(node accepted | its parent accepted) of each node.
        """
        nodes: list[int] = []
        for token, parent, rate in zip(draft.ids, draft.parents, rates, strict=True):
            above = nodes[parent] if parent >= 0 else -1
            node = self._nodes.setdefault((above, token), len(self.tokens))
            nodes.append(node)
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(above)
                self.rates.append(rate)
                self.owners.append(owner)
            elif rate > self.rates[node]:
                self.rates[node], self.owners[node] = rate, owner
        return nodes

    def weights(self) -> list[float]:
        """Returns P(node accepted) of every node.

        At most one sibling can be accepted: the likeliest keeps its rate, the others get at most the remainder.
        """
        left = [1.0] * (len(self.tokens) + 1)  # by parent, the root's first
        shares = [0.0] * len(self.tokens)
        for node in sorted(range(len(self.tokens)), key=self.rates.__getitem__, reverse=True):
            above = self.parents[node] + 1
            shares[node] = min(self.rates[node], left[above])
            left[above] -= shares[node]
        weights: list[float] = []
        for share, parent in zip(shares, self.parents, strict=True):
            weights.append(share * (weights[parent] if parent >= 0 else 1.0))
        return weights

    def draft(
        self, kept: Sequence[int], weights: Sequence[float], levels: int, decision: Decision | None = None
    ) -> Draft:
        """Returns the tree of the nodes ``kept``, scored by log ``weights``.

        Args:
            kept: Indices in rising order, with every node's parent.
            weights: P(node accepted) of every node.
            levels: Passes of the draft model.
            decision: The numbers behind it.
        """
        number = {node: i for i, node in enumerate(kept)}
        return Draft(
            tuple([self.tokens[node] for node in kept]),
            tuple([number[self.parents[node]] if self.parents[node] >= 0 else -1 for node in kept]),
            scores=log_scores([weights[node] for node in kept]),
            levels=levels,
            decision=decision,
        )


_NOTHING_FOUND = Draft((), (), levels=0)


@dataclass(frozen=True, slots=True)
class UnionMember:
    """A member of a union."""

    name: str  # its name in statistics
    proposer: Proposer  # drafts
    max_nodes: int | None = None  # maximum number of nodes of its drafts, None for the budget


@dataclass(eq=False, slots=True)
class Merge:
    """The draft of one request in a step, while its sources draft."""

    context: Context  # the request
    limit: int  # number of nodes, at most
    union: DraftUnion = field(default_factory=DraftUnion)  # the candidates of all sources
    weights: Sequence[float] = ()  # P(node accepted) of each
    kept: Sequence[int] = ()  # those that are verified, in their order
    value: float = 0.0  # expected accepted tokens of these, less their price


class Union(Proposer):
    """Merges the drafts of its sources.

    Args:
        sources: The sources; at most one that is not ``costless``.
        policy: Decides what is drafted and verified. Requests that ask for a draft length get it.
        name: The method's name.

    Attributes:
        copies: Sources that copy text.
        model: The source that is a model.
    """

    def __init__(self, sources: Sequence[UnionMember], policy: DraftPolicy, name: str) -> None:
        self.sources, self.policy, self.name = tuple(sources), policy, name
        self.copies = [source for source in sources if source.proposer.costless]
        models = [source for source in sources if not source.proposer.costless]
        if len(models) > 1:
            names = ", ".join(source.name for source in models)
            raise InvalidRequest(
                f"a mixture has at most one member that is a model, got {names}; pass the others as methods"
            )
        self.model = models[0] if models else None
        self.costless = self.model is None
        self.learns = any(source.proposer.learns for source in sources)
        self.needs = Needs.union(source.proposer.needs for source in sources)
        base = Proposer.observe
        self._verified: dict[int, Callable[[], None]] = {}  # by request: learns from its draft when it was verified
        self._observers = [source for source in sources if getattr(type(source.proposer), "observe", None) is not base]

    @staticmethod
    def of(proposer: Proposer, policy: DraftPolicy) -> "Union":
        """Returns a union of one proposer, or the proposer if it is a union."""
        return (
            proposer
            if isinstance(proposer, Union)
            else Union([UnionMember(proposer.name, proposer)], policy, proposer.name)
        )

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts, batch = [Draft.empty()] * len(contexts), len(contexts)
        asked = [i for i, budget in enumerate(budgets) if budget > 0]
        if not asked:
            return drafts
        requests = [Merge(contexts[i], budgets[i]) for i in asked]
        self._copy(requests, batch)
        lengths = self._lengths(requests, batch)
        modelled = drafts[: len(asked)]
        if self.model and any(lengths):
            modelled = self.model.proposer.propose([request.context for request in requests], lengths)
        for i, request, length, draft in zip(asked, requests, lengths, modelled, strict=True):
            drafts[i] = self._joined(request, length, draft, batch)
        return drafts

    def _copy(self, requests: Sequence[Merge], batch: int) -> None:
        """Merges the drafts of the sources that copy text."""
        contexts = [request.context for request in requests]
        searched = [c.depth is not None or self.policy.searches(c, batch) for c in contexts]
        if not any(searched):
            return
        budgets = [request.limit if due else 0 for request, due in zip(requests, searched, strict=True)]
        for source in self.copies:
            own = budgets if source.max_nodes is None else [min(budget, source.max_nodes) for budget in budgets]
            for request, draft in zip(requests, source.proposer.propose(contexts, own), strict=True):
                if len(draft):
                    record = self.policy.copy_record(request.context, source.name)
                    request.union.add(draft, record.add(draft, len(request.context.tokens)), source.name)
        for request, due in zip(requests, searched, strict=True):
            if due and request.context.depth is None:
                if request.union.tokens:
                    self._keep(request, batch)
                self.policy.searched(request.context, request.value if self.copies else None, batch)

    def _keep(self, request: Merge, batch: int) -> None:
        """Selects the nodes that are verified: the profitable ones, or as many as the request asks for."""
        weights = request.weights = request.union.weights()
        if request.context.depth is None:
            nodes, request.value = self.policy.keep(weights, request.limit, batch)
        else:
            nodes = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)[: request.limit]
        request.kept = sorted(nodes)

    def _lengths(self, requests: Sequence[Merge], batch: int) -> list[int]:
        """Returns the number of tokens that the model drafts for each request."""
        if self.model is None:
            return [0] * len(requests)
        policy, name, most = self.policy, self.model.name, self.model.max_nodes
        lengths = [request.limit if most is None else min(request.limit, most) for request in requests]
        if free := [i for i, request in enumerate(requests) if request.context.depth is None]:
            contexts = [requests[i].context for i in free]
            early = [self.model.proposer.ends_early(context) for context in contexts]
            decided = policy.lengths(name, contexts, [lengths[i] for i in free], early, batch)
            for i, length in zip(free, decided, strict=True):
                lengths[i] = length if length and self._adds(requests[i]) else 0
        return lengths

    def _adds(self, request: Merge) -> bool:
        """Returns whether the model is profitable beside the copied text.

        A sampled chain takes the place of that text. Fixed candidates join it, and are of use if its first tokens are
        wrong.
        """
        context = request.context
        if is_drawn(context, context.law):
            return self.policy.value(context) > request.value
        first = max((request.weights[node] for node in request.kept), default=0.0)
        return self.policy.value(context, covered=first) > 0.0

    def _joined(self, request: Merge, length: int, draft: Draft, batch: int) -> Draft:
        """Returns the draft of one request, for which the model was to draft ``length`` tokens."""
        context, union = request.context, request.union
        ready = bool(draft.limit or draft.levels)  # otherwise the model had to process more of the text first
        if not union.tokens and not (length and ready):
            return draft if length else _NOTHING_FOUND
        if length and ready and self.model:
            name, free = self.model.name, context.depth is None
            # A chain with an end is profitable. To look at a draft on a device takes more time than its rows.
            selected = free and context.end is None and not draft.unread
            if draft.drawn or not (union.tokens or selected):
                return self._passed_on(context, name, length, draft, batch)
            nodes = union.add(draft, self.policy.claim_record(context, name).add(draft, len(context.tokens)), name)
            self._keep(request, batch)
            if free:
                self.policy.drafted(context, None, length, draft, len({*nodes} & {*request.kept}))
        elif context.depth is not None:
            self._keep(request, batch)
        levels = (length if draft.levels is None else draft.levels) if length else 0
        sources = tuple([union.owners[node] for node in request.kept])
        expected = sum([request.weights[node] for node in request.kept])
        decision = self.policy.decision(sources, len(union.tokens), expected, batch)
        if not request.kept:
            return Draft((), (), levels=levels, decision=decision)
        return union.draft(request.kept, request.weights, levels, decision)

    def _passed_on(self, context: Context, name: str, length: int, draft: Draft, batch: int) -> Draft:
        """Returns a model's draft as it is. The policy learns from it when it was verified, and the host knows it."""
        free = context.depth is None
        expected = self.policy.value(context) if free else 0.0
        if free:
            start = len(context.tokens)
            self._verified[context.id] = partial(self.policy.drafted, context, name, length, draft, start=start)
        return draft.decided(length, lambda d: self.policy.decision((name,) * len(d), len(d), expected, batch))

    def reusable_prefix_len(self, context: Context) -> int:
        return min(source.proposer.reusable_prefix_len(context) for source in self.sources)

    def prefill(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        for source in self.sources:
            source.proposer.prefill(contexts, scores)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for source in self._observers:
            source.proposer.observe(contexts, observations)
        for context in contexts:
            if (learn := self._verified.pop(context.id, None)) is not None:
                learn()
            self.policy.settle(context)

    def needs_of(self, context: Context) -> Needs:
        return Needs.union(source.proposer.needs_of(context) for source in self.sources)

    @property
    def timed_part(self) -> Proposer | None:
        return self.model.proposer.timed_part if self.model else None

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(source.proposer.kv_bytes_per_token for source in self.sources)

    @property
    def state_bytes(self) -> int:
        return sum(source.proposer.state_bytes for source in self.sources)

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.enable_prefix_caches((source.proposer for source in self.sources), max_bytes)

    def forget(self, context: Context) -> None:
        for source in self.sources:
            source.proposer.forget(context)
        self._verified.pop(context.id, None)
        self.policy.forget(context)  # it may not be the engine's controller


def build_sources(configs: Sequence[Mapping[str, Any]], build_context: BuildContext) -> list[UnionMember]:
    """Builds the source of every configuration, each with a name of its own."""
    sources: list[UnionMember] = []
    for config in configs:
        method = config["method"]
        name = method if all(source.name != method for source in sources) else f"{method} {len(sources) + 1}"
        sources.append(UnionMember(name, build_context.member(config), config.get("num_speculative_tokens")))
    return sources


AUTO = "auto"
COPIES: tuple[Mapping[str, Any], ...] = (
    {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    {"method": "prediction"},
)
"""No request is drafted from what another one wrote, which its speed could show."""


class Auto(Union):
    """The union whose model may also draft alone, for requests that choose its method."""

    @property
    def alone(self) -> dict[str, Proposer]:
        return {self.model.name: Union([self.model], self.policy, self.model.name)} if self.model else {}


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """The method has no keys: other members or options are those of a mixture."""


def around(model: UnionMember | None, build_context: BuildContext) -> Auto:
    members = [*build_sources(COPIES, build_context), *([model] if model else [])]
    return Auto(members, build_context.policy, AUTO)


def build_auto(config: AutoConfig, build_context: BuildContext) -> Auto:
    """Builds the union, around the draft or heads that "model" names if it names any."""
    if (name := build_context.model) is None:
        return around(None, build_context)
    method = heads_method(load_config(resolve(name))) or "draft_model"
    return around(UnionMember(method, build_context.member({"method": method, "model": str(name)})), build_context)


AUTO_METHOD = Method(AutoConfig, build_auto, tokens=8, drafts_trees=True, takes_draft_model=True)


_DEFAULT = ({"method": "suffix"}, {"method": "recycling"})


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Members of the mixture."""

    # configurations as in ``speculative_config``, one per member, at most one of which is a model;
    # "num_speculative_tokens" bounds a member's nodes; without it they are bounded by the step's budget
    members: Sequence[Mapping[str, Any]] = _DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.members, str | Mapping) or not self.members:
            raise InvalidRequest("members must be a list of speculative configurations, one at least")
        for member in self.members:
            if not isinstance(member, Mapping) or not isinstance(member.get("method"), str):
                raise InvalidRequest(f"a member is a speculative configuration with a 'method', got {member!r}")
            if member["method"] in ("auto", "mixture"):
                raise InvalidRequest("a mixture cannot be a member of a mixture; list its members instead")
            integer("num_speculative_tokens of a member", member.get("num_speculative_tokens"), 1, optional=True)


def build_mixture(config: MixtureConfig, build_context: BuildContext) -> Union:
    return Union(build_sources(config.members, build_context), build_context.policy, "mixture")


MIXTURE = Method(MixtureConfig, build_mixture, tokens=16, drafts_trees=True)
