"""Audits the speculation of an OpenAI-compatible server from outside."""

from foretoken.audit.endpoint.run import Endpoint, audit_endpoint
from foretoken.probe.client import Patience

__all__ = ["Endpoint", "Patience", "audit_endpoint"]
