"""Which Host headers are served: DNS rebinding must not let web pages reach a server on loopback."""

from collections.abc import Iterator

import httpx
import pytest
from tests.serve.conftest import Running, running

from foretoken import LLM
from foretoken.core.errors import InvalidRequest
from foretoken.serve.settings import AllowedHosts, ServerSettings, allowed_hosts

LOOPBACK = AllowedHosts(())


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.8.9.1",
        "[::1]",
        "[::1]:8000",
        "[::ffff:127.0.0.1]:80",
    ],
)
def test_loopback_names_are_always_allowed(host: str) -> None:
    assert LOOPBACK.allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil-localhost",
        "8.8.8.8",
        "[::2]:8000",
        "[::1",
        "::1",
        "",
        ":8000",
        "localhost:80:80",
        "localhost@evil.example",
        "localhost:http",
        "a b",
        "\xe9.example",
        "127.0.0.1:8000/x",
        "[fe80::1%lo]",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    assert not LOOPBACK.allows(host)


def test_named_hosts_are_allowed() -> None:
    hosts = AllowedHosts(("gpu-box", "*.corp.example", "10.0.0.7", "FE80::1"))
    for host in ("GPU-box:8000", "a.b.corp.example", "10.0.0.7:8000", "[fe80:0::1]:8000", "localhost"):
        assert hosts.allows(host), host
    for host in ("corp.example", "gpu-box.example", "10.0.0.70", "xcorp.example"):
        assert not hosts.allows(host), host
    assert AllowedHosts(("*",)).allows("evil.example")


@pytest.mark.parametrize("host", ["http://a", "a:80", "a/b", "", "a b", "a.*", "*a", "[::1]", "user@a"])
def test_malformed_patterns_are_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="--allowed-host"):
        allowed_hosts("127.0.0.1", "127.0.0.1", False, (host,))


def test_when_hosts_are_checked() -> None:
    """On loopback without keys, and wherever names are given. A rebound page has no key."""
    assert allowed_hosts("myself", "127.0.0.1", keys=False, given=()) == AllowedHosts(("myself",))
    assert allowed_hosts("::1", "::1", keys=False, given=("proxy",)) == AllowedHosts(("proxy",))
    assert allowed_hosts("localhost", "127.0.0.1", keys=True, given=()) is None
    assert allowed_hosts("0.0.0.0", "0.0.0.0", keys=False, given=()) is None
    assert allowed_hosts("gpu", "10.0.0.7", keys=True, given=("proxy",)) == AllowedHosts(("gpu", "10.0.0.7", "proxy"))


@pytest.fixture(scope="module")
def guarded(spare: LLM) -> Iterator[Running]:
    with running(spare, ServerSettings(hosts=LOOPBACK)) as found:
        yield found


def test_a_foreign_host_is_refused_everywhere(guarded: Running) -> None:
    for method, path in (("GET", "/"), ("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
        answer = httpx.request(method, guarded.url + path, headers={"Host": "evil.example:8000"}, json={"prompt": "x"})
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert error["code"] == "host_not_allowed" and "--allowed-host evil.example" in error["message"]
    assert httpx.get(f"{guarded.url}/health").status_code == 200
    port = guarded.url.rpartition(":")[2]
    assert httpx.get(f"{guarded.url}/v1/models", headers={"Host": f"localhost:{port}"}).status_code == 200
