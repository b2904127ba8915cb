"""Constants of the cost model and of the control of draft lengths, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """All constants. The defaults were chosen by benchmarks/never_slower.py and benchmarks/adaptive.py."""

    # Curves of seconds by size.
    memory: float = 24.0  # observations of a size that count; older ones fade, since machines and texts change
    trusted: float = 4.0  # observations of a curve after which an outlier is recognized
    clip: float = 1.5  # times the expected seconds: a longer observation counts as this, and halves the mean's weight
    row_share: float = 0.03  # of one row's time that a further row takes while one size is known; typical of CPUs

    # Speed of the machine.
    known: float = 2.0  # observations of a size after which its time shows the machine's speed
    follow: float = 0.3  # share of a small change that one step applies: most of it is noise
    jump: float = 0.15  # log ratio above which a change is no noise
    leap: float = 0.5  # share of a large change that one step applies
    max_change: float = 2.0  # largest factor that one step can show
    dip: float = 0.9  # of a smaller size's time: a new size that takes less shows a faster machine
    disturbed: float = 4.0  # times the expected seconds: other programs ran during the step
    passing: int = 3  # disturbed steps in a row after which the disturbance is taken to last

    # Plain steps, drafting, and catching up.
    calibrated: float = 0.5  # observations that a drafting time of the warm-up counts as: its prompt was synthetic
    compared: float = 2.0  # observations that a pass of the warm-up counts as: all sizes were timed in one moment
    first_plain: float = 1.5  # observations of plain steps before drafting begins: one alone may be disturbed
    refresh: int = 4  # steps with drafts, at least, between two plain ones: cheap while drafting gains nothing
    patience: float = 200.0  # more such steps per unit of speedup, so that timing plain steps costs half a percent
    stale: float = 3.0  # observations that older plain steps count as after ``refresh`` steps with drafts
    slack: int = 8  # tokens missed by the proposer whose time cannot be distinguished from drafting
    missed_per_step: float = 16.0  # missed tokens that take as long as a drafting step, until measured

    # Acceptance of draft tokens, as priors.
    first_rank: float = 0.6  # probability that the first draft token is accepted
    first_free: float = 0.2  # the same of what drafts for free: most text repeats nothing
    next_rank: float = 0.75  # each rank's acceptance over that of the rank before
    pool: float = 2.0  # drafts that ``next_rank`` counts as
    request_memory: float = 48.0  # drafts of one request that count
    kind_memory: float = 256.0  # drafts that count over all requests of a kind
    strength: float = 4.0  # drafts that the estimate over all requests counts as in a new request

    # Goodput and trials.
    margin: float = 1.02  # speedup that a draft must promise: the best of many estimates flatters
    caution: float = 1.25  # tokens per plain token of the added time: errors cost more, the more time a draft adds
    light: float = 0.006  # seconds of a plain step per request; a mixture's own arithmetic takes half a millisecond
    mixed: float = 0.05  # of a plain step from which a mixture is the default; its trees and arithmetic take about 3 ms
    horizon: float = 32.0  # steps over which catching up on missed tokens has to pay off
    first_token: float = 0.25  # plain steps by which drafting may delay the first token of a request
    trial: int = 4  # draft tokens of a trial
    trial_hope: float = 0.8  # acceptance rate at which a trial must pay off to be made at all
    min_wait: int = 8  # steps without drafts before the first trial; doubles after each trial that fails
    max_wait: int = 256  # steps
    refused: float = 0.8  # of the warm-up's seconds of drafting that are believed after a trial was refused
    doubt: float = 0.25  # weight of earlier evidence after a trial that went well: the text has changed

    # How long a decision holds for the same requests.
    hold: int = 4  # steps with drafts
    deciding: float = 0.0003  # seconds of a decision for one request
    deciding_more: float = 0.00006  # seconds for each further request
    decided: float = 0.01  # share of all time that decisions may take, so that fast targets are not slowed by them
    hold_long: int = 16  # steps with drafts that a decision holds at most, however fast the target
    hold_none: int = 64  # steps without: nothing is learned from them that would change the decision
    skipped: int = 15  # of ``skipped + 1`` steps without drafts that are not observed; the last one shows the speed
    awake: int = 3  # steps that are observed before a decision without drafts ends

    # Ledger.
    start: float = 2.0  # plain steps that may be lost before any time was saved
    max_balance: float = 16.0  # plain steps that may be saved up, so that a good hour does not permit a bad minute
    charged: float = 3.0  # times the expected seconds that the proposer is charged at most: others caused the rest
    unknown: int = 2  # draft tokens of one request while the time of drafting is unknown

    # Memory.
    look_short: float = 0.05  # seconds between two readings of the free memory while it is short
    look: float = 0.25  # seconds otherwise; a reading takes half a millisecond
    look_plenty: float = 1.0  # seconds while more than ``plenty`` times the threshold is free
    plenty: float = 4.0  # times the threshold, which cannot be used up between two readings
    recovery: int = 20  # readings with memory to spare before drafts grow again
    max_halvings: int = 6  # of the draft length; after these nothing is drafted


TUNING = Tuning()
"""The defaults."""
