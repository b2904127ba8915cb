"""Operating the server: TLS, JSON logs, traces, readiness and reloading."""

import datetime
import json
import logging
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.serve.conftest import PATIENCE, Run, Running, running, served
from tests.serve.test_errors import OK

from foretoken import LLM
from foretoken.core.errors import InvalidRequest
from foretoken.serve.request_log import JsonFormatter, RequestTracer
from foretoken.serve.settings import tls_files

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Writes a self-signed certificate for loopback, and its key."""
    import ipaddress

    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return files


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_tls_with_certificates_of_clients_json_logs_and_reloading(tmp_path: Path, run: Run) -> None:
    """One server of its own: HTTPS, SIGHUP with a new key and a new certificate, lines of JSON, SIGTERM."""
    (cert, key), (client, client_key) = certificate(tmp_path, "server"), certificate(tmp_path, "client")
    keys = tmp_path / "keys.json"
    assert run("keys add --name first", str(keys)).code == 0
    tls = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", client, "--ssl-cert-reqs", "2")
    options = (*map(str, tls), "--api-key-file", str(keys), "--log-format", "json")
    trusted = ssl.create_default_context(cafile=str(cert))
    trusted.load_cert_chain(client, client_key)
    with served(*options) as (process, said):
        url = json.loads(said.readline())["message"].split()[-1]
        assert url.startswith("https://")
        with httpx.Client(verify=trusted) as known:
            assert known.get(f"{url[:-3]}/ready").json() == {"status": "ok"}
            assert known.get(f"{url}/models").status_code == 401
        with pytest.raises(httpx.HTTPError), httpx.Client(verify=ssl.create_default_context(cafile=cert)) as other:
            other.get(f"{url}/models")
        renewed, renewed_key = certificate(tmp_path, "renewed")
        cert.write_bytes(renewed.read_bytes())
        key.write_bytes(renewed_key.read_bytes())
        process.send_signal(signal.SIGHUP)
        lines = [json.loads(said.readline()) for _ in range(3)]
        assert any("read the certificate" in line["message"] for line in lines)
        trusted.load_verify_locations(renewed)
        with httpx.Client(verify=trusted) as known:
            known.get(f"{url}/models", headers={"X-Request-Id": "mine"})
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in said]
        assert process.wait(120) == 0
    (line,) = [line for line in rest if line.get("request_id") == "mine"]
    assert line["status"] == 401 and line["path"] == "/v1/models" and line["level"] == "info"


def test_wrong_tls_options_are_refused_in_one_line(tmp_path: Path, run: Run) -> None:
    cert, key = certificate(tmp_path, "server")
    other = certificate(tmp_path, "other")[1]
    for options, words in (
        ((None, key, None, 0), "need --ssl-certfile"),
        ((tmp_path / "none", None, None, 0), "there is no file"),
        ((cert, other, None, 0), "must be a certificate and its private key"),
        ((key, None, None, 0), "must be a certificate and its private key"),
        ((cert, key, None, 2), "needs --ssl-ca-certs"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            tls_files(*options)
    assert tls_files(None, None, None, 0) is None and tls_files(cert, key, None, 0) is not None
    assert "--ssl-certfile: there is no file" in run("serve --port 0 --ssl-certfile", str(tmp_path / "none")).err


@pytest.mark.slow
def test_readiness_ends_before_liveness(spare: LLM) -> None:
    with running(spare) as server:
        for path in ("/ready", "/health/ready", "/health/live", "/health", "/ping"):
            assert httpx.get(server.url + path).json() == {"status": "ok"}
        server.worker.draining = True
        assert (
            httpx.get(f"{server.url}/ready").status_code == httpx.get(f"{server.url}/health/ready").status_code == 503
        )
        assert httpx.get(f"{server.url}/health/live").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/stdlib"])
def test_head_has_the_headers_of_get_and_no_body(server: Running, path: str) -> None:
    head, got = httpx.head(server.url + path), httpx.get(server.url + path)
    assert head.status_code == got.status_code == 200 and not head.content and got.content
    assert head.headers["content-type"] == got.headers["content-type"] and "content-length" in head.headers


@pytest.mark.slow
def test_head_of_what_cannot_be_read_is_refused(server: Running) -> None:
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405
    assert httpx.head(f"{server.url}/v1/models/none").status_code == 404


WATCHED = """
import atexit, gc, sys
atexit.register(lambda: print("frozen:", gc.get_freeze_count(), file=sys.stderr))
from foretoken.cli.main import main
main(["serve", "--port", "0", "--dtype", "float32"])
"""


@pytest.mark.slow
def test_sigterm_of_an_idle_server_waits_for_nothing() -> None:
    """An idle connection is closed, and the interpreter's last garbage collection has nothing to search."""
    with subprocess.Popen([sys.executable, "-c", WATCHED], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split()[-1]
            with httpx.Client() as kept, httpx.Client() as other:
                assert kept.get(f"{url}/models").status_code == other.get(f"{url}/models").status_code == 200
                process.send_signal(signal.SIGTERM)
                said = process.stderr.read()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert int(said.split("frozen: ")[1]) > 100_000


@pytest.mark.slow
def test_lines_of_json(spare: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with running(spare) as server, caplog.at_level(logging.INFO, "foretoken"):
        server.post({**OK, "max_tokens": 8, "ignore_eos": True}, headers={"X-Request-Id": "r"})
        httpx.get(f"{server.url}/v1/models%0Aforged")
        server.until(lambda: len(caplog.records) == 2)
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert not any("\n" in line for line in lines)
    first, second = map(json.loads, lines)
    assert first["request_id"] == "r" and first["status"] == 200 and first["level"] == "info"
    assert first["completion_tokens"] == 8 and first["prompt_tokens"] and first["finish_reason"] == "length"
    assert 0 < first["first_token_seconds"] <= first["seconds"] and first["mean_acceptance_length"] >= 1
    assert 0 <= first["draft_acceptance_rate"] <= 1 and first["speculative_method"] == "draft_model"
    assert second["path"] == "/v1/models\nforged" and "\n" not in caplog.messages[1]


@pytest.mark.slow
def test_a_request_is_traced(spare: LLM) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = RequestTracer(SimpleSpanProcessor(exporter))
    with running(spare, tracer=tracer) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert server.post({**OK, "max_tokens": 8, "ignore_eos": True}, headers=headers).status_code == 200
        server.post({"prompt": "x", "temperature": -1})
        httpx.get(f"{server.url}/v1/models")
        server.until(lambda: len(exporter.get_finished_spans()) >= 5)
    queue, prefill, decode, whole, refused = exporter.get_finished_spans()
    assert whole.name == "text_completion foretoken" and [queue.name, prefill.name, decode.name] == [
        "queue",
        "prefill",
        "decode",
    ]
    assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == PARENT
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {whole.context.span_id}
    assert queue.start_time <= queue.end_time == prefill.start_time <= prefill.end_time == decode.start_time
    found = dict(whole.attributes)
    assert found["gen_ai.operation.name"] == "text_completion" and found["gen_ai.request.model"] == "foretoken"
    assert found["gen_ai.usage.output_tokens"] == 8 and found["gen_ai.usage.input_tokens"] > 0
    assert found["gen_ai.response.finish_reasons"] == ("length",) and found["http.response.status_code"] == 200
    assert found["foretoken.speculation.mean_acceptance_length"] >= 1
    assert refused.name == "text_completion" and refused.attributes["http.response.status_code"] == 400
    tracer.close()


def test_traces_go_to_an_http_address() -> None:
    with pytest.raises(InvalidRequest, match="--otlp-traces-endpoint must be an HTTP address"):
        RequestTracer.to_endpoint("localhost:4317")


@pytest.mark.slow
def test_the_sdk_of_traces_is_imported_for_traces_only() -> None:
    code = (
        "import sys, foretoken.serve.app; assert not any(name.startswith('opentelemetry.sdk') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
