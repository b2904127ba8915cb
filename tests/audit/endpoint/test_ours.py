"""Our own server, which switches speculation off for a request, audited from outside."""

from __future__ import annotations

import pytest
from tests.serve.conftest import running

from foretoken import LLM
from foretoken.audit.endpoint import Endpoint, audit_endpoint
from foretoken.audit.result import CheckOutcome
from foretoken.bench.workloads import FUNCTIONS


@pytest.mark.slow
def test_our_server(tiny_pair):
    llm = LLM(tiny_pair.target, tiny_pair.draft, max_model_len=512, speculative_config={"num_speculative_tokens": 3})
    with running(llm) as server:
        model = server.client.models.list().data[0].id
        endpoint = Endpoint(server.url, model, budget=4000, checkpoint=str(tiny_pair.target))
        result = audit_endpoint(endpoint, [function[:60] for function in FUNCTIONS])
    failed = [check for check in result.checks if check.outcome is CheckOutcome.FAILED]
    assert not failed, [check.evidence for check in failed]
    assert result.subject["server"] == "foretoken" and result.subject["plain_by"] == '{"speculative_tokens": 0}'
    checks = {check.name: check for check in result.checks}
    for name in ("speculation", "greedy parity", "log-probabilities", "sampled distribution", "other parameters"):
        assert checks[name].outcome is CheckOutcome.PASSED, checks[name].evidence
