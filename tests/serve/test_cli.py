"""The command: what it refuses before it starts, in one line, and what it says when it runs."""

import signal
import subprocess
import sys

import httpx
import pytest
from tests.serve.conftest import served

from foretoken.cli import serve as command
from foretoken.cli.serve_options import response_store, size_in_bytes
from foretoken.core.errors import InvalidRequest


def test_a_broken_chat_template_is_refused_before_a_model_is_loaded(run, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    (tmp_path / "models.json").write_text('[{"model": "/none", "chat_template": "broken.jinja"}]')
    for option, file in (("--chat-template", "broken.jinja"), ("--model-config", "models.json")):
        result = run("serve --port 0", option, str(tmp_path / file))
        assert result.code == 1 and result.err.count("\n") == 1
        assert "broken.jinja is not valid Jinja (line 1" in result.err


@pytest.mark.parametrize("flags, shares", [([], False), (["--share-cache-across-keys"], True)])
def test_keys_share_a_cache_where_the_operator_says_so(run, monkeypatch, flags, shares):
    def settings(**given: object) -> None:
        assert given["share_cache_across_keys"] is shares and given["api_keys"] == ("a", "b")
        raise InvalidRequest("seen")

    monkeypatch.setattr(command, "ServerSettings", settings)
    result = run("serve --api-key a --api-key b", *flags)
    assert (result.code, result.err) == (1, "foretoken: error: seen\n")


TRACES = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@pytest.mark.parametrize(
    "absent, options, words",
    [
        (["fastapi", "starlette", "uvicorn", "llguidance"], [], "(fastapi); pip install 'foretoken[serve]'"),
        (["ray"], ["--replicas", "2"], "(ray); pip install 'foretoken[ray]'"),
        ([TRACES], ["--otlp-traces-endpoint", "http://localhost:4318/v1/traces"], "pip install 'foretoken[otel]'"),
    ],
    ids=["serve", "ray", "otel"],
)
def test_without_an_extra(absent: list[str], options: list[str], words: str) -> None:
    arguments = ["serve", "--port", "0", *options]
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); from foretoken.cli.main import main; main({arguments})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and words in done.stderr


@pytest.mark.parametrize(
    "text, size", [("2GiB", 2**31), ("512MB", 2**29), ("1k", 1024), ("1.5 g", 3 * 2**29), ("1000", 1000)]
)
def test_sizes_have_units_that_are_powers_of_1024(text: str, size: int) -> None:
    assert size_in_bytes("--kv-cache-memory-bytes", text) == size


def test_a_store_is_bounded_by_number_or_by_size() -> None:
    assert response_store("100") == {"stored_responses": 100}
    assert response_store("256MiB") == {"stored_bytes": 2**28}
    assert response_store(None) == {}


@pytest.mark.parametrize("text", ["", "0", "-1", "2 parsecs", "GiB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--kv-cache-memory-bytes must be a size"):
        size_in_bytes("--kv-cache-memory-bytes", text)


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
@pytest.mark.parametrize("host, keys, warned", [("0.0.0.0", "a b", False), ("0.0.0.0", "", True)])
def test_the_address_is_said_and_an_open_one_without_keys_warned_of(host: str, keys: str, warned: bool) -> None:
    """The address, and a warning on an open address without keys; Ctrl-C ends it well."""
    with served("--host", host, FORETOKEN_API_KEY=keys) as (process, said):
        lines = [said.readline(), said.readline()]
        url = lines[0].split()[-1].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/models").status_code == (401 if keys else 200)
        authorized = {"Authorization": f"Bearer {keys[-1:] or 'x'}"}
        assert httpx.get(f"{url}/models", headers=authorized).status_code == 200
        process.send_signal(signal.SIGINT)
        rest = said.read()
        assert process.wait(120) == 0
    assert lines[0].startswith(f"foretoken at http://{host}:") and "playground" in lines[1]
    assert ("--api-key" in rest) == warned and "GET /v1/models 200" in rest and "Traceback" not in rest
