"""Finds where two texts that should be equal diverge, and whether a tie between the best two tokens explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from foretoken.audit.result import Check, CheckOutcome
from foretoken.audit.subject import Audited, CompletionSettings, Ids
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
