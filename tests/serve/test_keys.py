"""API keys from a file: what each may do and how much, changes while the server runs, and that no key leaks."""

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.serve.conftest import Clock, Run, Running, running
from tests.serve.test_errors import OK, error_of

from foretoken import LLM
from foretoken.core.errors import InvalidRequest
from foretoken.serve.errors import ApiError
from foretoken.serve.key_file import KeyRecord, add, digest, new_key, read_keys, revoke
from foretoken.serve.keyring import KeyRing, KeyUsage, duration
from foretoken.serve.settings import ServerSettings

pytestmark = pytest.mark.slow


def made(file: Path, name: str, **limits: Any) -> str:
    key = new_key()
    add(file, KeyRecord(name=name, sha256=digest(key).hex(), **limits))
    return key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(spare: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, str], Path]]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {
        "plain": made(file, "plain"),
        "ops": made(file, "ops", scopes=("metrics", "admin")),
        "other": made(file, "other", models=("other",)),
        "expired": made(file, "expired", expires="2026-01-01T00:00:00+00:00"),
        "few": made(file, "few", requests_per_minute=2),
        "short": made(file, "short", tokens_per_minute=30),
        "alone": made(file, "alone", max_concurrency=1),
    }
    settings = ServerSettings(model_names=("stdlib", "other"), key_file=file)
    with pytest.MonkeyPatch.context() as patch:  # buckets that do not fill meanwhile, however slow the machine is
        patch.setattr("foretoken.serve.keyring.KeyUsage", lambda record, _: KeyUsage(record, lambda: 0.0))
        with running(spare, settings) as server:
            yield server, keys, file


def test_each_scope_of_a_key_opens_its_paths_alone(keyed: tuple[Running, dict[str, str], Path]) -> None:
    server, keys, _ = keyed

    def get(path: str, key: str) -> httpx.Response:
        return httpx.get(server.url + path, headers=bearer(keys[key]))

    assert server.post(OK, headers=bearer(keys["plain"])).status_code == 200
    assert get("/v1/models", "plain").status_code == get("/version", "ops").status_code == 200
    assert get("/metrics", "ops").status_code == 200
    for refused in (get("/metrics", "plain"), server.post(OK, headers=bearer(keys["ops"]))):
        assert error_of(refused, 403)["code"] == "insufficient_scope"
    assert error_of(server.post(OK), 401)["code"] == "invalid_api_key"
    for path in ("/health", "/ping", "/ready", "/health/ready", "/health/live"):
        assert httpx.get(server.url + path).status_code == 200


def test_a_key_may_be_for_some_models(keyed: tuple[Running, dict[str, str], Path]) -> None:
    server, keys, _ = keyed
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["other"], max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["other"]
        assert client.completions.create(model="other", prompt="x", max_tokens=2).model == "other"
        with pytest.raises(openai.NotFoundError, match="may not use the model 'stdlib'; it may use: other"):
            client.completions.create(model="stdlib", prompt="x", max_tokens=2)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("stdlib")
    assert server.post({"prompt": "x"}, headers=bearer(keys["other"])).status_code == 404  # stdlib is the usual one


def test_an_expired_key(keyed: tuple[Running, dict[str, str], Path]) -> None:
    server, keys, _ = keyed
    assert "expired" in error_of(server.post(OK, headers=bearer(keys["expired"])), 401)["message"]


def test_rates_of_requests_and_tokens(keyed: tuple[Running, dict[str, str], Path]) -> None:
    server, keys, _ = keyed
    headers = bearer(keys["few"])
    answers = [server.post(OK, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert int(answers[2].headers["retry-after"]) == 30
    assert error_of(answers[2], 429)["type"] == "rate_limit_error"
    assert "x-ratelimit-limit-requests" not in server.post(OK, headers=bearer(keys["plain"])).headers
    headers = bearer(keys["short"])
    long = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
    first = server.post(long, headers=headers)
    assert first.status_code == 200 and first.headers["x-ratelimit-limit-tokens"] == "30"
    second = server.post(long, headers=headers)
    assert error_of(second, 429)["code"] == "rate_limit_exceeded"
    assert 55 <= int(second.headers["retry-after"]) <= 70, "31 tokens of debt and one, at half a token a second"


def test_requests_at_once(keyed: tuple[Running, dict[str, str], Path]) -> None:
    server, keys, _ = keyed
    headers = bearer(keys["alone"])
    with server.streaming({"prompt": "x", "max_tokens": 4000, "ignore_eos": True}, headers=headers):
        assert "1 requests answered at once" in error_of(server.post(OK, headers=headers), 429)["message"]
        assert server.post(OK, headers=bearer(keys["plain"])).status_code == 200, "others go on"
    server.until(server.idle)
    server.until(lambda: server.post(OK, headers=headers).status_code == 200)


def test_keys_come_and_go_while_the_server_runs(keyed, caplog):
    server, keys, file = keyed
    new = made(file, "new")
    server.app.state.keys.reload()
    assert server.post(OK, headers=bearer(new)).status_code == 200
    revoke(file, "new")
    server.until(lambda: server.post(OK, headers=bearer(new)).status_code == 401)
    good = file.read_text()
    with caplog.at_level(logging.ERROR, "foretoken"):
        file.write_text(good[:-20])
        server.until(
            lambda: bool(server.post(OK, headers=bearer(keys["plain"])) and "stay as they were" in caplog.text)
        )
    file.write_text(good)
    assert "the API keys stay as they were" in caplog.text and "not JSON" in caplog.text
    assert server.post(OK, headers=bearer(keys["plain"])).status_code == 200
    server.app.state.keys.reload()


def test_each_key_of_a_file_has_a_cache_of_its_own(keyed: tuple[Running, dict[str, str], Path]) -> None:
    server, _, file = keyed
    (new, second), prompt = (made(file, name) for name in ("c1", "c2")), {"prompt": "import os\n" * 60, "max_tokens": 1}
    server.app.state.keys.reload()
    assert server.app.state.keys.several and KeyRing(("a", "b")).several and not KeyRing(("a",)).several
    salts = [salt_of(server, prompt, key) for key in (new, new, second)]
    assert salts[0] == salts[1] != salts[2] and all(salts)


def salt_of(server: Running, body: dict[str, Any], key: str) -> str | None:
    """Returns the cache salt with which the engine gets a request."""
    seen, build = [], server.worker._build

    def noted(prompt: Any, params: Any, restrictions: Any) -> Any:
        seen.append(params.cache_salt)
        return build(prompt, params, restrictions)

    server.worker._build = noted
    try:
        assert server.post(body, headers=bearer(key)).status_code == 200
    finally:
        server.worker._build = build
    return seen[0]


def test_the_log_names_keys_and_never_has_them(keyed, caplog):
    server, keys, _ = keyed
    with caplog.at_level(logging.DEBUG, "foretoken"):
        server.post(OK, headers=bearer(keys["plain"]))
        server.post(OK, headers=bearer("ft-" + "wrong" * 8))
        server.until(lambda: len(caplog.records) >= 2)
    fields = [record.foretoken for record in caplog.records if hasattr(record, "foretoken")]
    assert fields[0]["key"] == "plain" and fields[0]["completion_tokens"] and "key" not in fields[1]
    told = json.dumps(fields) + caplog.text
    assert not any(key in told or digest(key).hex() in told for key in (*keys.values(), "wrongwrong"))


# without a server


def test_buckets_fill_evenly() -> None:
    clock = Clock()
    record = KeyRecord(name="k", sha256="0" * 64, requests_per_minute=60, tokens_per_minute=600)
    usage = KeyUsage(record, clock)
    for _ in range(60):
        usage.end(usage.begin(0), 0)
    with pytest.raises(ApiError) as refused:
        usage.begin(0)
    assert refused.value.headers["Retry-After"] == "1"
    clock.now = 2.0
    usage.end(usage.begin(400), 500)  # 100 tokens were held, 500 used
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "100"
    assert usage.headers()["x-ratelimit-reset-tokens"] == "50s"
    usage.update(KeyRecord(name="k", sha256="0" * 64, tokens_per_minute=1200))
    assert "x-ratelimit-limit-requests" not in usage.headers()
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "700"
    assert (duration(0.0), duration(0.5), duration(1.2), duration(360)) == ("0ms", "500ms", "2s", "6m0s")


def test_commands_add_list_and_revoke_keys(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "keys.json"
    add, options = f"keys add {file} --name", "--scope generate --scope metrics --expires 30d --requests-per-minute 60"
    added = run(f"{add} ci {options}")
    key = added.out.strip()
    assert added.code == 0 and key.startswith("ft-") and len(key) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text() and digest(key).hex() in file.read_text()
    (record,) = read_keys(file)
    assert record.scopes == ("generate", "metrics") and record.requests_per_minute == 60 and record.expires
    assert "already has a key named ci" in run(f"{add} ci").err
    listed = json.loads(run(f"keys list {file} --json").out)
    assert listed["keys"][0]["name"] == "ci" and "sha256" not in listed["keys"][0]
    assert "ci" in run(f"keys list {file}").out
    assert "no key named 'x'; it has: ci" in run(f"keys revoke {file} x").err
    assert run(f"keys revoke {file} ci").code == 0 and read_keys(file) == []
    assert "--expires must be a duration" in run(f"{add} a --expires soon").err
    assert "--expires must be in the future" in run(f"{add} a --expires 2020-01-01").err
    assert "scopes must be among" in run(f"{add} a --scope root").err
    assert "name must be" in run(f"{add} 'a b'").err


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "cannot read the key file"),
        ("{", "is not JSON"),
        ("[]", 'an object with a list "keys"'),
        ('{"keys": [], "more": 1}', "nothing else"),
        ('{"keys": [3]}', "key 1 of the key file"),
        ('{"keys": [{"name": "a"}]}', "it has no sha256"),
        ('{"keys": [{"name": "a", "sha256": "ft-secret"}]}', "64 hexadecimal digits"),
        ('{"keys": [{"name": "a", "sha256": "%s", "scope": []}]}', "unknown key(s) in it: scope"),
        ('{"keys": [{"name": "a", "sha256": "%s", "scopes": []}]}', "at least one of"),
        ('{"keys": [{"name": "a", "sha256": "%s", "scopes": "admin"}]}', "must be a list of texts"),
        ('{"keys": [{"name": "a", "sha256": "%s", "models": []}]}', "at least one model"),
        ('{"keys": [{"name": "a", "sha256": "%s", "expires": "soon"}]}', "expires must be a time"),
        ('{"keys": [{"name": "a", "sha256": "%s", "tokens_per_minute": 0}]}', "tokens_per_minute must be an integer"),
        ('{"keys": [{"name": "a", "sha256": "%s"}, {"name": "b", "sha256": "%s"}]}', "hashes are unique"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, run, content, words):
    file = tmp_path / "keys.json"
    if content is not None:
        file.write_text(content.replace("%s", "a" * 64))
    with pytest.raises(InvalidRequest) as refused:
        read_keys(file)
    assert words in str(refused.value) and "ft-secret" not in str(refused.value)
    said = run("serve --port 0 --api-key-file", str(file)).err
    assert words in said and said.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    made(file, "a")
    KeyRing(file=file)
    assert not caplog.records
    file.chmod(0o644)
    KeyRing(file=file)
    assert "can be read by others" in caplog.text
