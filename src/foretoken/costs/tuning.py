"""Constants of the cost model and of the control of draft lengths, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """All constants. The defaults were chosen by benchmarks/never_slower.py and benchmarks/adaptive.py."""

    # Curves of seconds by size.
    memory: float = 24.0
    """Observations of a size that count. Older ones fade, because machines and texts change."""
    trusted: float = 4.0
    """Observations of a curve after which an outlier is recognised as one."""
    clip: float = 1.5
    """Multiple of the expected seconds. A longer observation counts as this much and halves the trust in the mean."""
    row_share: float = 0.03
    """Share of one row's time that a further row takes, while a single size is known. Typical of CPUs."""

    # Speed of the machine.
    known: float = 2.0
    """Observations of a size that let it tell the speed of the machine."""
    follow: float = 0.3
    """Share of a small change of speed that one step applies: most of it is noise."""
    jump: float = 0.15
    """Log ratio above which a change of speed is no noise."""
    leap: float = 0.5
    """Share of a large change of speed that one step applies."""
    max_change: float = 2.0
    """Largest factor of a change of speed in one step."""
    dip: float = 0.9
    """A new size that takes less than this share of a smaller size's time shows a faster machine."""
    disturbed: float = 4.0
    """Multiple of the expected seconds above which a step was disturbed by other programs."""
    passing: int = 3
    """Disturbed steps in a row after which the disturbance is taken to last."""

    # Plain steps, drafting, and catching up.
    calibrated: float = 0.5
    """Observations that a drafting time of the warm-up counts as: it was measured on a synthetic prompt."""
    compared: float = 2.0
    """Observations that a pass of the warm-up counts as: all sizes were measured in the same moment."""
    first_plain: float = 1.5
    """Observations of plain steps before drafting begins. One alone may be disturbed."""
    refresh: int = 4
    """Steps with drafts, at least, between two timings of a plain step. Cheap while drafting gains nothing."""
    patience: float = 200.0
    """Further such steps per unit of speedup, so that the timing costs about half a percent."""
    stale: float = 3.0
    """Observations that older plain steps count as after ``refresh`` steps with drafts."""
    slack: int = 8
    """Tokens missed by the proposer whose processing is too short to be told apart from drafting."""
    missed_per_step: float = 16.0
    """Missed tokens that take as long as one drafting step, until measured."""

    # Acceptance of draft tokens.
    first_rank: float = 0.6
    """Prior probability that the first draft token is accepted."""
    next_rank: float = 0.75
    """Prior ratio of each rank's acceptance to that of the rank before."""
    pool: float = 2.0
    """Drafts that the prior ratio counts as."""
    request_memory: float = 48.0
    """Drafts of a request that count."""
    kind_memory: float = 256.0
    """Drafts that count over all requests of a kind."""
    strength: float = 4.0
    """Drafts that the estimate over all requests counts as at the start of a request."""

    # Goodput.
    margin: float = 1.02
    """Speedup that a draft must promise: the best of many estimates flatters."""
    caution: float = 1.25
    """Tokens that a draft must promise per plain token that its added time would give. Errors of the cost model cost
    more, the more time a draft adds."""
    horizon: float = 32.0
    """Steps over which catching up on missed tokens has to pay off."""
    first_token: float = 0.25
    """Plain steps by which drafting may delay the first token of a request."""
    trial: int = 4
    """Draft tokens of a trial in a request that does not draft."""
    trial_hope: float = 0.8
    """Acceptance rate at which a trial must pay off to be made at all."""
    min_wait: int = 8
    """Steps without drafts before the first trial of a request."""
    max_wait: int = 256
    """Longest wait; waits double after each failed trial."""
    doubt: float = 0.25
    """Weight of earlier evidence after a trial that went well: the text has changed."""

    # How long a decision holds for the same requests.
    hold: int = 4
    """Steps with drafts."""
    hold_none: int = 64
    """Steps without: nothing is learned from them that would change the decision."""
    rest: int = 15
    """Steps of a decision without drafts that are not observed, out of ``rest + 1``: the last tells the machine's
    speed, and a tenth of a millisecond per step matters where a pass takes one."""
    awake: int = 3
    """Steps that are observed before a decision without drafts ends."""

    # Ledger.
    start: float = 2.0
    """Plain steps that may be lost before anything was gained."""
    max_balance: float = 16.0
    """Plain steps that may be saved up, so that a good hour licenses no bad minute."""
    charged: float = 3.0
    """Multiple of the expected seconds of a step above which the proposer is not charged: others caused it."""
    unknown: int = 2
    """Draft tokens of one request while the time of drafting is unknown."""

    # Memory.
    look_short: float = 0.05
    """Seconds between two readings of the free memory while it is short."""
    look: float = 0.25
    """Seconds otherwise."""
    look_plenty: float = 1.0
    """Seconds while more than ``plenty`` times the threshold is free. A reading takes half a millisecond."""
    plenty: float = 4.0
    """Multiple of the threshold that cannot be used up between two readings."""
    recovery: int = 20
    """Readings with memory to spare before drafts grow again."""
    max_halvings: int = 6
    """Halvings of the draft length after which nothing is drafted."""


TUNING = Tuning()
"""The defaults."""
