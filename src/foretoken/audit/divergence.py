"""Where two texts that should be one part, and whether a tie between the best two tokens explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from foretoken.audit.result import Check, Outcome
from foretoken.audit.subject import Ask, Audited, Ids
from foretoken.core.context import Exactness
from foretoken.core.streams import SharedStream


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs.

    prompt, position: which, and tokens before it. margin: between the best two scores of the plain pass. moved: the
    largest difference of a score between the two passes. Both None where the divergence did not come a second time.
    """

    prompt: int
    position: int
    margin: float | None = None
    moved: float | None = None

    @property
    def tie(self) -> bool:
        """Two scores that each moved by ``moved`` can have changed places."""
        return self.margin is not None and self.moved is not None and self.margin <= 2.0 * self.moved

    def __str__(self) -> str:
        where = f"prompt {self.prompt + 1}, token {self.position + 1}"
        if self.margin is None:
            return f"{where}, and not again when repeated"
        kind = "a tie" if self.tie else "not a tie"
        return f"{where}, {kind}: the best two lie {self.margin:.3g} apart and the passes {self.moved:.3g}"


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position at which two texts differ, in a token or in being over."""
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def explained(
    subject: Audited, prompts: Sequence[Ids], index: int, position: int, plain: Ask, speculative: Ask
) -> Divergence:
    """Generates both texts again, with their rows. ``plain`` and ``speculative`` are for all of ``prompts``."""
    alone = replace(plain, seeds=(plain.seeds[index],), keep=True)
    here = subject.generate([prompts[index]], alone)[0]
    there = subject.generate(prompts, replace(speculative, keep=True))[index]
    found = parting(here.tokens, there.tokens)
    if found != position or here.rows is None or there.rows is None or position >= len(here.rows):
        return Divergence(index, position)
    mine = _scores(here.rows[position], plain, plain.seeds[index], position)
    other = there.rows[min(position, len(there.rows) - 1)]
    best = mine.topk(2).values
    temperature = plain.law.temperature or 1.0
    moved = float((here.rows[position] - other).abs().max()) / temperature
    return Divergence(index, position, float(best[0] - best[1]), moved)


def _scores(row: Tensor, ask: Ask, seed: int, position: int) -> Tensor:
    """What the largest of is emitted: logits, in the trajectory grade with their noise, log p + G."""
    if ask.grade is not Exactness.TRAJECTORY or ask.law.greedy:
        return row
    probs = ask.law.probs(row[None], [])[0]
    return SharedStream(seed, position).race(probs, 0).log()


def parity(
    name: str, found: Sequence[Divergence], promised: bool, ways: Mapping[str, int], tokens: int, note: str = ""
) -> Check:
    """The verdict on texts that should be equal. ways: how many were compared, by how they were made.

    promised: rows are promised to be bit-equal, so that even a tie breaks a promise. tokens: of the plain texts.
    """
    wrong = [one for one in found if promised or not one.tie]
    compared = ", ".join(f"{count} {way}" for way, count in ways.items())
    if not found:
        evidence = f"token for token the plain text: {compared}"
    else:
        evidence = f"{len(found)} of {sum(ways.values())} texts part from the plain one ({compared}); first: {found[0]}"
        if not wrong:
            evidence += "; all ties, as its passes are not promised to be bit-equal"
        elif wrong[0].tie:
            evidence += "; its passes are promised to be bit-equal, so even a tie is an error"
    numbers = {
        "texts": dict(ways), "tokens": tokens, "diverged": len(found), "not_ties": sum(not one.tie for one in found),
        "divergences": [asdict(one) | {"tie": one.tie} for one in found[:20]],
    }  # fmt: skip
    return Check(name, Outcome.FAILED if wrong else Outcome.PASSED, evidence + note, numbers)
