"""Interface of proposers. A proposer sees contexts and hidden states as data, and may be wrong, late or absent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.step import StepOutput
from foretoken.models.base import Model, Scores


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs that a proposer needs from the target.

    Attributes:
        taps: Layer indices whose hidden states it reads.
        live_steps: It learns from decode steps as they ran: from the rows of rejected draft tokens, or from their
            duration.
        logits: ``observe`` reads logits. Without it they may be missing, see ``Scores.argmax``.
        ranks: Number of the likeliest tokens of each row that ``observe`` reads, see ``Scores.ranked``. Where a model
            does not rank them, there are logits.
    """

    taps: tuple[int, ...] = ()
    live_steps: bool = False
    logits: bool = False
    ranks: int = 0

    @staticmethod
    def union(needs: "Iterable[Needs]") -> "Needs":
        all_needs = list(needs)
        taps = tuple(sorted({tap for each in all_needs for tap in each.taps}))
        live_steps, logits = (any(getattr(each, name) for each in all_needs) for name in ("live_steps", "logits"))
        return Needs(taps, live_steps, logits, max((each.ranks for each in all_needs), default=0))


@dataclass(frozen=True, slots=True)
class Observation:
    """Outcome of one decode step for one sequence: the step and all of the target's scores."""

    step: StepOutput
    scores: Scores


class Proposer:
    """Base class of proposers. This one proposes nothing, which is plain decoding.

    Attributes:
        name: The method's name in statistics and logs.
        needs: What it needs from the target.
        costless: Drafts come from text and tables: they take negligible time and are fixed candidates.
        learns: Keeps state across requests, so warm-up must not use synthetic requests.
    """

    name: str = "none"
    needs: Needs = Needs()
    costless: bool = False
    learns: bool = False

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """Returns one draft per context with at most ``budgets[i]`` nodes.

        Budgets were decided before anything is sampled.
        """
        return [Draft.empty() for _ in contexts]

    def ends_early(self, context: Context) -> bool:
        """Returns whether drafts for ``context`` end where ``Context.end`` says."""
        return False

    def needs_of(self, context: Context) -> Needs:
        """Returns the needs that ``context`` has."""
        return self.needs

    def reusable_prefix_len(self, context: Context) -> int:
        """Called before the target's prefill of a text, also after a preemption.

        Returns:
            The number of leading tokens whose hidden states the proposer does not need.
        """
        return len(context.tokens)

    def prefill(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        """Called after a prefill chunk other than the last of its text, with the target's states there."""

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        """Called after every decode step; contexts already hold the emitted tokens."""

    def forget(self, context: Context) -> None:
        """Called when a sequence ends, with ``finish_reason``, or is preempted. Does nothing for an unknown one."""

    @property
    def timed_part(self) -> "Proposer | None":
        """The part whose drafts warm-up times on a synthetic prompt.

        None if drafting takes no time, or everything would learn from the prompt.
        """
        return None if self.costless or self.learns else self

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the proposer's own KV cache for one token."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent state in the proposer's own model; see ``Model.state_bytes``."""
        return 0

    def enable_prefix_cache(self, max_bytes: int) -> None:
        """Enables prefix caching within ``max_bytes``; see ``Model.enable_prefix_cache``."""

    @staticmethod
    def enable_prefix_caches(members: "Iterable[Proposer]", max_bytes: int) -> None:
        """Divides ``max_bytes`` among several proposers in proportion to their bytes per token."""
        members = list(members)
        each = max(1, sum(member.kv_bytes_per_token for member in members))
        for member in members:
            member.enable_prefix_cache(max_bytes * member.kv_bytes_per_token // each)


class ModelProposer(Proposer):
    """Base class of proposers with one draft model."""

    model: Model

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token

    @property
    def state_bytes(self) -> int:
        return self.model.state_bytes

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.model.enable_prefix_cache(max_bytes)


MEMBERS = tuple(
    name for name, member in vars(Proposer).items() if name[0] != "_" and not isinstance(member, staticmethod)
)
"""Names of all members of ``Proposer``, which a wrapper forwards."""


class Wrapper(Proposer):
    """Base class of proposers that add something to ``inner``. Forwards all members that a subclass does not define."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner


class ForwardedMember:
    """A member of ``Proposer`` that a wrapper reads from its ``inner``, and sets there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Wrapper | None, owner: type[Wrapper]) -> Any:
        return self if wrapper is None else getattr(wrapper.inner, self.name)

    def __set__(self, wrapper: Wrapper, value: Any) -> None:
        setattr(wrapper.inner, self.name, value)


for _name in MEMBERS:
    setattr(Wrapper, _name, ForwardedMember(_name))


@dataclass(frozen=True)
class BuildContext:
    """Inputs of a method's builder.

    Attributes:
        target: The model to speed up.
        tokenizer: The target's tokenizer.
        path: The target's folder, None for a live module.
        model: What the configuration names under "model": a draft, heads, a datastore.
        load: Loads another model with the target's dtype, device and backend, and other options of ``load_model``.
        member: Builds another method from its own configuration, for mixtures.
        policy: The engine's draft policy, of which unions ask what to draft.
    """

    target: Model
    tokenizer: Any
    path: Path | None
    model: str | Path | None
    load: Callable[..., Model]
    member: Callable[[Mapping[str, Any]], Proposer]
    policy: DraftPolicy = field(default_factory=DraftPolicy)

    def load_draft(self, model: str | Path, window: int | None) -> Model:
        """Returns a draft model whose attention sees at most ``window`` tokens; None for its own windows."""
        return self.load(model) if window is None else self.load(model, attention_window=window)


@dataclass(frozen=True)
class Method:
    """A speculative method as users name it.

    Attributes:
        config: A frozen dataclass whose fields are the method's keys in ``speculative_config``.
        build: Builds the proposer from a ``config`` and a ``BuildContext``.
        tokens: Default number of draft tokens per step.
        drafts_trees: Drafts are trees unless the key "top_k" is 1. Methods with a key "tree" draft what that names.
        takes_draft_model: "model" is a draft model or heads, so that ``draft_model=`` may name it.
    """

    config: type[Any]
    build: Callable[[Any, BuildContext], Proposer]
    tokens: int = 4
    drafts_trees: bool = False
    takes_draft_model: bool = False
