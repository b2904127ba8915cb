"""Is my pair exact? A statistical verdict with its power, and a control that must fail."""

from foretoken.audit.result import Audit, Check, Outcome
from foretoken.audit.run import audit
from foretoken.audit.subject import Ask, Audited, Round, Text

__all__ = ["Ask", "Audit", "Audited", "Check", "Outcome", "Round", "Text", "audit"]
