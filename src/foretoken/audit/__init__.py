"""Audits whether a pair decodes exactly: statistical tests with stated power, and a control that must fail."""

from foretoken.audit.run import audit
from foretoken.audit.subject import (
    Audit,
    Audited,
    AuditedCompletion,
    AuditStep,
    Check,
    CheckOutcome,
    CompletionSettings,
)

__all__ = ["Audit", "AuditStep", "Audited", "AuditedCompletion", "Check", "CheckOutcome", "CompletionSettings", "audit"]
