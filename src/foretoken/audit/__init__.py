"""Audits whether a pair decodes exactly: statistical tests with stated power, and a control that must fail."""

from foretoken.audit.result import Audit, Check, CheckOutcome
from foretoken.audit.run import audit
from foretoken.audit.subject import Audited, AuditedCompletion, AuditStep, CompletionSettings

__all__ = ["Audit", "AuditStep", "Audited", "AuditedCompletion", "Check", "CheckOutcome", "CompletionSettings", "audit"]
