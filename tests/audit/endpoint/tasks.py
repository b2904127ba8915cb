"""Tasks on the fake server, without a whole audit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foretoken.audit.endpoint.run import Endpoint
from foretoken.audit.endpoint.task import EndpointTask, Sizes
from foretoken.probe.client import EndpointClient, Patience
from foretoken.probe.server import DIALECTS, ServerKind, Side, probed

from .fake import Behaviour, serving

PROMPTS = ("the rain in ", "of this other ", "a = 1\n", "sold (x) ")
QUICK = Patience(timeout=60.0, retries=2, pause=0.01)
SIZES = Sizes(
    parity_prompts=4, parity_tokens=16, sampled=120, sampled_plain=20, sampled_tokens=24, tuned=8, tuned_tokens=24
)


def endpoint(url: str, **options: Any) -> Endpoint:
    return Endpoint(url, "table", **{"patience": QUICK, "budget": 4000} | options)


@contextmanager
def tasked(behaviour: Behaviour, sizes: Sizes = SIZES) -> Iterator[EndpointTask]:
    """A task on both sides of a server."""
    dialect = DIALECTS[ServerKind.FORETOKEN]
    assert dialect.plain is not None
    with serving(behaviour) as url:
        sides = []
        for name, switch in (("plain", dialect.plain), ("speculative", {})):
            side = probed(Side(name, EndpointClient(url, patience=QUICK), "table", dialect, switch), PROMPTS[0])
            assert isinstance(side, Side), side
            sides.append(side)
        yield EndpointTask(sides[1], sides[0], PROMPTS, sizes, 8, 5e-4, 0)
