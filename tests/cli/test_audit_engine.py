"""``foretoken audit --engine`` on an engine that a fake server plays."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from tests.audit.endpoint.fake import Behaviour, serving
from tests.audit.endpoint.tasks import PROMPTS
from tests.audit.endpoint.test_engines import Fake, through

from foretoken.audit.endpoint.engines import EnginePair


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Options of an audit of vLLM, which a fake server plays."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    asked = []

    @contextmanager
    def started(name, model, config):
        asked.append((name, str(model), config))
        with serving(Behaviour()) as url:
            yield EnginePair(name, "table", Fake(through(url, speculative_tokens=0)), Fake(through(url)))

    monkeypatch.setattr("foretoken.audit.endpoint.engines.started", started)
    return asked, ("--engine", "vllm", "--budget", "4ktokens", "--prompts", str(prompts))


@pytest.mark.slow
def test_an_engine_is_audited_like_a_server(run, words):
    asked, options = words
    result = run("audit", *options, "--model", "m", "--draft-model", "d", "--json")
    record = json.loads(result.out)
    assert result.code in (0, 3) and record["subject"]["server"] == "vllm", result.err
    assert record["subject"]["endpoint"] == "vllm 1.0"
    ((name, model, config),) = asked
    assert (name, model, config.model, config.method_in_force) == ("vllm", "m", "d", "draft_model")
    assert "generated tokens" in result.err


@pytest.mark.parametrize(
    "args, said",
    [
        ((), "vllm is audited with draft_model or ngram, not with 'auto'; name one"),
        (("--speculative-config", '{"method": "none"}'), "there is nothing to audit: the method is 'none'"),
    ],
)
def test_an_engine_needs_a_way_to_speculate(run, args, said):
    result = run("audit", "--engine", "vllm", "--model", "m", *args)
    assert result.code == 1 and said in result.err
