"""Constants of the cost model and of the draft policy, each with its unit and the measurement that set it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """All constants.

    The defaults were chosen on the simulated steps and recorded streams of tests/control. Halving or doubling one of
    the decisions or of the acceptance model changed the mean speed on these streams by less than half a percent.
    ``memory_steps``, ``hold_steps`` and ``trial_tokens`` were measured with SmolLM2 on chat prompts and two Zen 5 cores
    of a shared machine: with 24, 4 and 4, which follow noise, decoding was 4 % slower at temperature 0 and 3 % at
    temperature 1. ``settle_steps`` is for two cores of a Xeon, where SmolLM2's first plain steps after drafting take
    5.1, 4.8, 4.6, 4.3, 3.9, 4.0, 3.8, 3.5, 3.4, 3.3, 3.2 and 3.1 ms.
    """

    # Costs.
    memory_steps: float = 64.0  # observations of a size that count; older ones fade, since machines change
    trusted_steps: float = 2.0  # observations after which an unusual time shows the machine's speed
    weak_steps: float = 0.5  # observations that a time of the warm-up counts as: its prompt was synthetic
    follow_share: float = 0.5  # share of a change of the machine's speed that one step applies: most of it is noise
    clip_ratio: float = 1.5  # times the expected seconds: a longer time counts as this, and halves the mean's weight
    outlier_ratio: float = 4.0  # times the expected seconds: other programs ran during the step
    row_share: float = 0.03  # of one row's time that a further row takes while one size is known; typical of CPUs
    refresh_steps: int = 4  # steps with drafts, at least, between two plain ones
    settle_steps: int = 12  # steps after drafting by a model until caches hold the target's weights again: see above
    timing_share: float = 0.005  # of the tokens gained by speculation that timing plain steps may cost

    # Acceptance.
    prior_acceptance: float = 0.65  # of a draft token before any observation
    prior_drafts: float = 4.0  # drafts that the prior of an estimate counts as
    request_drafts: float = 48.0  # drafts of one request that count
    shared_drafts: float = 256.0  # drafts of all requests that count

    # Decisions.
    margin_tokens: float = 0.02  # that a draft must promise beyond its price: the best of many estimates flatters
    horizon_steps: float = 32.0  # steps in which processing the tokens that the model missed has to be profitable
    first_token_steps: float = 0.5  # plain steps by which drafting may delay the first token of a request
    doubt_share: float = 0.5  # weight of earlier evidence after a trial that succeeded: the text has changed
    known_failures: int = 3  # searches for text to copy in vain, at most, that other requests spare a new one
    hold_steps: int = 8  # steps for which a decision about a model's drafts holds
    wait_steps: int = 8  # steps without drafts before the first trial; doubles after each trial that fails, to 32 times
    trial_tokens: int = 2  # draft tokens of a trial
    budget_steps: float = 16.0  # plain steps that may be saved up for losses; a quarter of them at the start


TUNING = Tuning()
"""The defaults."""
