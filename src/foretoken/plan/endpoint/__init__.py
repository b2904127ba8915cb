"""Plans the speculation of an OpenAI-compatible server from outside."""

from foretoken.plan.endpoint.drafters import LocalModels
from foretoken.plan.endpoint.outcome import EndpointPlan
from foretoken.plan.endpoint.run import PlannedEndpoint, plan_endpoint
from foretoken.probe.server import ServerPair

__all__ = ["EndpointPlan", "LocalModels", "PlannedEndpoint", "ServerPair", "plan_endpoint"]
