"""Scopes of texts by ``cache_salt`` and by API key, through the real server."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.serve.conftest import PATIENCE, Running, chunks_of, running

from foretoken import LLM
from foretoken.serve.request_state import RequestState
from foretoken.serve.settings import ServerSettings

pytestmark = pytest.mark.slow

LONG = "class Ünïcode:\n    x = 1  # größe 🙂\n" * 12
SECRET = "def greet(name):\n    return '日本語 17 i * i'\n"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
KEYS = ("first-key", "second-key")
ASK = {"prompt": "name = ", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def new_llm(pair: Any) -> LLM:
    steady = {"method": "suffix", "num_speculative_tokens": 8, "control": "fixed"}
    return LLM(
        pair.target,
        speculative_config=steady,
        methods=[{"method": "recycling", "top_k": 1}],
        dtype="float32",
        enable_prefix_caching=True,
    )


def served(pair: Any, **settings: Any) -> Iterator[Running]:
    with running(new_llm(pair), ServerSettings(chat_template=TEMPLATE, **settings)) as found:
        yield found


@pytest.fixture(scope="module")
def open_server(tiny_pair: Any) -> Iterator[Running]:
    yield from served(tiny_pair)


@pytest.fixture(scope="module")
def keyed(tiny_pair: Any) -> Iterator[Running]:
    yield from served(tiny_pair, api_keys=KEYS)


@pytest.fixture(scope="module")
def shared(tiny_pair: Any) -> Iterator[Running]:
    yield from served(tiny_pair, api_keys=KEYS, share_cache_across_keys=True)


def headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def cached(server: Running, prompt: str, key: str | None = None, **extra: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **extra}
    answer = server.post(body, headers=headers(key))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def drafts(server: Running, key: str | None = None, path: str = "completions", **extra: Any) -> set[str]:
    """The texts of all paths of all rounds' drafts, as a stream with ``return_steps`` shows them."""
    found = set()
    answer = server.post({**ASK, "stream": True, "return_steps": True, **extra}, path, headers=headers(key))
    assert answer.status_code == 200, answer.text
    for chunk in chunks_of(answer.iter_lines()):
        assert "error" not in chunk, chunk
        for step in chunk.get("steps", ()):
            texts: list[str] = []
            for node in step["draft"]:
                texts.append((texts[node["parent"]] if node["parent"] >= 0 else "") + node["text"])
            found |= set(texts)
    return found


def leaks(texts: set[str]) -> bool:
    """Whether a draft held a piece of the secret."""
    return any(SECRET[at : at + 6] in text for text in texts for at in range(len(SECRET) - 5))


def say(server: Running, key: str | None = None, **extra: Any) -> None:
    body = {**ASK, "ignore_eos": False, "structured_outputs": {"choice": [SECRET]}, **extra}
    answer = server.post(body, headers=headers(key))
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == SECRET


@pytest.mark.parametrize("method", ["suffix", "recycling"])
def test_streamed_steps_never_show_the_text_of_another_salt(open_server: Running, method: str) -> None:
    own = {"speculative_method": method, "prompt": f"{method} = "}
    say(open_server, **own, cache_salt="mine")
    assert leaks(drafts(open_server, **own, cache_salt="mine")), "the control: within a salt it does"
    assert not leaks(drafts(open_server, **own, cache_salt="yours"))
    assert not leaks(drafts(open_server, **own))


def test_without_salts_and_keys_requests_share(open_server: Running) -> None:
    say(open_server, prompt="shared = ")
    assert leaks(drafts(open_server, prompt="shared = "))
    assert cached(open_server, LONG) == 0 and cached(open_server, LONG) >= 64


def test_chats_have_scopes_too(keyed: Running) -> None:
    def chat(key: str, salt: str) -> int:
        body = {"messages": [{"role": "user", "content": "# chat\n" + LONG}], "max_tokens": 2, "cache_salt": salt}
        answer = keyed.post(body, "chat/completions", headers=headers(key)).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    mine, yours = KEYS
    assert chat(mine, "one") == 0 and chat(mine, "one") >= 64
    assert chat(mine, "other") == 0 and chat(yours, "one") == 0


def test_several_keys_are_scopes_of_their_own(keyed: Running) -> None:
    mine, yours = KEYS
    say(keyed, mine)
    assert leaks(drafts(keyed, mine)) and not leaks(drafts(keyed, yours))
    assert not leaks(drafts(keyed, yours, cache_salt=mine))
    assert cached(keyed, LONG, mine) == 0 and cached(keyed, LONG, mine) >= 64
    assert cached(keyed, LONG, yours) == 0 and cached(keyed, LONG, yours) >= 64


def test_a_salt_divides_a_keys_scope_and_joins_no_other(keyed: Running) -> None:
    mine, yours = KEYS
    prompt = "# divided\n" + LONG
    assert [cached(keyed, prompt, key, cache_salt="s") for key in (mine, yours)] == [0, 0]
    assert cached(keyed, prompt, mine) == 0
    assert all(cached(keyed, prompt, key, cache_salt="s") >= 64 for key in (mine, yours))


def test_keys_may_share_where_the_operator_says_so(shared: Running) -> None:
    mine, yours = KEYS
    say(shared, mine)
    assert leaks(drafts(shared, yours))
    assert cached(shared, LONG, mine) == 0 and cached(shared, LONG, yours) >= 64
    assert cached(shared, LONG, yours, cache_salt="own") == 0


@pytest.mark.parametrize("salt", ["", 1, ["a"], "x" * 1025])
def test_a_salt_that_is_none_is_refused(open_server: Running, salt: Any) -> None:
    error = open_server.post({**ASK, "cache_salt": salt}).json()["error"]
    assert error["param"] == "cache_salt" and error["type"] == "invalid_request_error"


def test_nothing_that_is_counted_names_a_salt_a_key_or_a_text(keyed: Running) -> None:
    say(keyed, KEYS[0], cache_salt="very-secret-salt")
    page = httpx.get(f"{keyed.url}/metrics", headers=headers(KEYS[1]), timeout=PATIENCE).text
    assert "foretoken:prefix_cache_hits" in page
    for hidden in ("very-secret-salt", *KEYS, "greet", "日本語"):
        assert hidden not in page


def test_no_salt_reaches_the_scope_of_another_key() -> None:
    clients, salts = ("a", "b", '["a", "b"]'), (None, "a", "b", '", "', "null")
    scopes = {RequestState(client=client).effective_salt(salt) for client in clients for salt in salts}
    assert len(scopes) == len(clients) * len(salts) and not scopes & set(salts)
    assert RequestState().effective_salt("s") == "s" and RequestState().effective_salt(None) is None
