"""Checks of texts that must be equal, and of drafts that must be accepted whole.

Greedy parity: the same text with and without speculation, alone and in a ragged batch. Trajectory equality: one text
per seed, with and without speculation, at every depth, alone and in a batch. Self-draft control: drafts of the target
itself are accepted whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from torch import Tensor

from foretoken.audit.subject import Audited, AuditedCompletion, AuditTask, Check, CheckOutcome, CompletionSettings, Ids
from foretoken.core.context import Exactness
from foretoken.core.streams import SharedStream


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs. margin, moved: None if the divergence was not reproduced."""

    prompt: int  # index
    position: int  # number of tokens before the divergence
    margin: float | None = None  # difference between the best two scores of the plain pass
    moved: float | None = None  # largest difference of a score between the two passes

    @property
    def tie(self) -> bool:
        """Whether two scores that each moved by ``moved`` can have swapped."""
        return self.margin is not None and self.moved is not None and self.margin <= 2.0 * self.moved

    def __str__(self) -> str:
        where = f"prompt {self.prompt + 1}, token {self.position + 1}"
        if self.margin is None:
            return f"{where}, and not again when repeated"
        kind = "a tie" if self.tie else "not a tie"
        return f"{where}, {kind}: the best two lie {self.margin:.3g} apart and the passes {self.moved:.3g}"


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Returns the first position at which two texts differ, in a token or in length; None if they are equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def explain_divergence(
    subject: Audited,
    prompts: Sequence[Ids],
    index: int,
    position: int,
    plain: CompletionSettings,
    speculative: CompletionSettings,
) -> Divergence:
    """Generates both texts again with their logits, and compares these. Settings are for all of ``prompts``."""
    alone = replace(plain, seeds=(plain.seeds[index],), keep=True)
    plain_text = subject.generate([prompts[index]], alone)[0]
    other_text = subject.generate(prompts, replace(speculative, keep=True))[index]
    again = first_difference(plain_text.tokens, other_text.tokens)
    if again != position or plain_text.rows is None or other_text.rows is None or position >= len(plain_text.rows):
        return Divergence(index, position)
    scores = _scores(plain_text.rows[position], plain, plain.seeds[index], position)
    other_row = other_text.rows[min(position, len(other_text.rows) - 1)]
    best = scores.topk(2).values
    temperature = plain.law.temperature or 1.0
    moved = float((plain_text.rows[position] - other_row).abs().max()) / temperature
    return Divergence(index, position, float(best[0] - best[1]), moved)


def _scores(row: Tensor, settings: CompletionSettings, seed: int, position: int) -> Tensor:
    """Returns the scores whose argmax is emitted: logits, or in the trajectory grade log p + Gumbel noise."""
    if settings.grade is not Exactness.TRAJECTORY or settings.law.greedy:
        return row
    probs = settings.law.probs(row[None], [])[0]
    return SharedStream(seed, position).race(probs, 0).log()


def parity(name: str, divergences: Sequence[Divergence], promised: bool, ways: Mapping[str, int], tokens: int) -> Check:
    """Returns the check of texts that should be equal. tokens: of the plain texts.

    promised: whether passes are batch-invariant, so that even a tie is an error. ways: number of compared texts, by
    how they were generated.
    """
    wrong = [one for one in divergences if promised or not one.tie]
    compared = ", ".join(f"{count} {way}" for way, count in ways.items())
    if not divergences:
        evidence = f"token for token the plain text: {compared}"
    else:
        share = f"{len(divergences)} of {sum(ways.values())}"
        evidence = f"{share} texts differ from the plain one ({compared}); first: {divergences[0]}"
        if not wrong:
            evidence += "; all ties, as its passes are not promised to be bit-equal"
        elif wrong[0].tie:
            evidence += "; its passes are promised to be bit-equal, so even a tie is an error"
    numbers = {
        "texts": dict(ways),
        "tokens": tokens,
        "diverged": len(divergences),
        "not_ties": sum(not one.tie for one in divergences),
        "divergences": [asdict(one) | {"tie": one.tie} for one in divergences[:20]],
    }
    return Check(name, CheckOutcome.FAILED if wrong else CheckOutcome.PASSED, evidence, numbers)


GREEDY, TRAJECTORY, SELF_DRAFT = "greedy parity", "trajectory equality", "self-draft control"
GREEDY_TOKENS, GREEDY_PROMPTS = 64, 16
GREEDY_COMPLETIONS = 8  # of ``NOISE_TOKENS`` for a prompt: plain, alone, in a batch, and in one as controlled
TOKENS, TEXTS, PORTIONS = 32, 8, 8
DEPTHS = (1, 8)  # beside the configured depth and the controller's own
SELF_DRAFT_COMPLETIONS = 6  # for a text: three modes, in which the draft computes as much as the target
MIN_SHARE = 0.95  # of steps accepted whole where two passes over one text may differ
_TRAJECTORY_SEEDS, _SELF_DRAFT_SEEDS = 1, 2


def greedy(work: AuditTask) -> Check:
    """Compares prompts one at a time until the deadline, then all of them in one batch where supported."""
    subject = work.subject
    settings = CompletionSettings(subject.law(0.0), GREEDY_TOKENS, (0,), subject.depth, ends=subject.ends, batch=1)
    plain: list[AuditedCompletion] = []
    alone: list[AuditedCompletion] = []
    most = min(GREEDY_PROMPTS, len(work.prompts), work.fitting(GREEDY_PROMPTS, GREEDY_COMPLETIONS))
    for index in work.portions(most):
        prompt = [work.prompts[index]]
        plain += subject.generate(prompt, replace(settings, depth=0))
        alone += subject.generate(prompt, settings)
    prompts = work.prompts[: len(plain)]
    every = replace(settings, seeds=(0,) * len(prompts), batch=subject.batch)
    divergences = divergences_of(subject, prompts, plain, alone, replace(every, batch=1))
    ways = {"alone": len(plain)}
    if subject.batch > 1 and len(prompts) > 1:
        for way, depth in (("in a batch", subject.depth), ("in a batch as controlled", None)):
            batched = replace(every, depth=depth)
            divergences += divergences_of(subject, prompts, plain, subject.generate(prompts, batched), batched)
            ways[way] = len(plain)
    return parity(GREEDY, divergences, subject.bit_equal, ways, sum(len(text.tokens) for text in plain))


def trajectory(work: AuditTask, float32: bool = True) -> Check:
    """Compares portions of 8 texts until the deadline. float32: also one portion in float32 where possible."""
    subject = work.subject
    if not subject.seeded:
        return Check(TRAJECTORY, CheckOutcome.SKIPPED, "it does not promise one text for one seed")
    depths, divergences, texts = _depths(subject), list[Divergence](), 0
    size = work.fitting(TEXTS, trajectory_completions(subject) * (1 + float32))
    for portion in work.portions(PORTIONS):
        divergences += _portion(work, subject, portion, size)
        texts += size
    ways = {f"at depths {_named(depths)}, alone and in batches of {size}": texts * len(depths) * 2}
    other = subject.in_float32() if float32 else None
    if other is not None:
        divergences += _portion(work, other, 0, size)
        ways["in float32"] = size * len(depths) * 2
    return parity(TRAJECTORY, divergences, subject.bit_equal, ways, texts * TOKENS)


def trajectory_completions(subject: Audited) -> int:
    """Returns the number of completions of a text: plain, and at each depth alone and in a batch."""
    return 1 + 2 * len(_depths(subject))


def _portion(work: AuditTask, subject: Audited, portion: int, size: int) -> list[Divergence]:
    prompts, seeds = work.turn(portion, size), work.seeds(_TRAJECTORY_SEEDS, portion, size)
    law = subject.law(work.temperature)
    plain = CompletionSettings(law, TOKENS, seeds, depth=0, grade=Exactness.TRAJECTORY, batch=1)
    expected = subject.generate(prompts, plain)
    divergences = []
    for depth, batch in product(_depths(subject), (1, size)):
        settings = replace(plain, depth=depth, batch=batch)
        divergences += divergences_of(subject, prompts, expected, subject.generate(prompts, settings), settings)
    return divergences


def self_draft(work: AuditTask) -> Check:
    """Checks greedy, sampled and seeded decoding: every draft is accepted to its full depth."""
    subject = work.subject.self_drafting()
    if subject is None:
        return Check(SELF_DRAFT, CheckOutcome.SKIPPED, "its decode steps are not visible")
    modes = {
        "greedy": (0.0, Exactness.DISTRIBUTION),
        "drawn": (work.temperature, Exactness.DISTRIBUTION),
        "seeded": (work.temperature, Exactness.TRAJECTORY),
    }
    size = work.fitting(TEXTS, SELF_DRAFT_COMPLETIONS)
    shares: dict[str, float] = {}
    steps = 0
    for index, (name, (temperature, grade)) in enumerate(modes.items()):
        settings = CompletionSettings(
            subject.law(temperature),
            TOKENS,
            work.seeds(_SELF_DRAFT_SEEDS, index, size),
            grade=grade,
            batch=subject.batch,
        )
        seen = [one for text in subject.generate(work.turn(0, size), settings) for one in text.steps]
        shares[name] = sum(one.whole for one in seen) / max(1, len(seen))
        steps += len(seen)
        work.tick()
    required = 1.0 if subject.bit_equal else MIN_SHARE
    outcome = CheckOutcome.PASSED if min(shares.values()) >= required else CheckOutcome.FAILED
    by_law = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    evidence = f"drafts of the target itself accepted whole in {steps} steps: {by_law}; {required:.0%} expected"
    return Check(SELF_DRAFT, outcome, evidence, {"steps": steps, "accepted_whole": shares, "required": required})


def divergences_of(
    subject: Audited,
    prompts: Sequence[Ids],
    expected: Sequence[AuditedCompletion],
    texts: Sequence[AuditedCompletion],
    settings: CompletionSettings,
) -> list[Divergence]:
    """Returns the differences of texts from those of plain decoding, one prompt at a time. settings: of the texts."""
    parts = [first_difference(here.tokens, there.tokens) for here, there in zip(expected, texts, strict=True)]
    plain = replace(settings, depth=0, batch=1)
    return [
        explain_divergence(subject, prompts, i, at, plain, settings) for i, at in enumerate(parts) if at is not None
    ]


def _depths(subject: Audited) -> tuple[int | None, ...]:
    return (*dict.fromkeys((*DEPTHS, *([subject.depth] if subject.depth else []))), None)


def _named(depths: Sequence[int | None]) -> str:
    return ", ".join("as controlled" if depth is None else str(depth) for depth in depths)
