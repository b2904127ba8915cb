"""Audits the speculation of an OpenAI-compatible server from outside."""

from foretoken.audit.endpoint.client import Patience
from foretoken.audit.endpoint.run import Endpoint, audit_endpoint

__all__ = ["Endpoint", "Patience", "audit_endpoint"]
