"""Audits of a toy: an engine whose law anyone can compute, honest or with an error planted."""

from time import monotonic

from foretoken.audit.implementations import Foretoken
from foretoken.audit.subject import AuditTask
from foretoken.audit.tally import ALPHA
from foretoken.control.fixed import Fixed
from foretoken.engine.loop import Engine
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.verify import Rule, choose

TARGET = ToyModel(vocab_size=12, order=1, seed=3, sharpness=1.0)
PROMPTS = ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11, 0, 1), (2,))


def drafting(target: ToyModel = TARGET, strength: float = 0.5, **config) -> DraftModel:
    return DraftModel(target.perturbed(strength), DraftModelConfig(**config))


def subject(
    proposer: Proposer | None = None, rule: Rule = choose, depth: int = 3, kind: type[Foretoken] = Foretoken
) -> Foretoken:
    """Prompts are words of digits."""
    return kind(Engine(TARGET, proposer or drafting(), Fixed(depth), rule=rule), lambda text: [*map(int, text)])


def work(audited: Foretoken, seconds: float = 600.0, level: float = ALPHA, temperature: float = 1.0) -> AuditTask:
    """With time for everything a test asks for, so that its figures are the same anywhere."""
    return AuditTask(audited, PROMPTS, temperature, seed=1, level=level, deadline=monotonic() + seconds)
