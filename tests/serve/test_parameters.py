"""Parameters of vLLM's and llama.cpp's clients, and vLLM's tokenizer API."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import Pair
from tests.serve.conftest import PATIENCE, Running, chunks_of, running
from tests.serve.test_errors import error_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from foretoken import LLM, zoo
from foretoken.core.errors import InvalidRequest
from foretoken.serve.errors import ApiError
from foretoken.serve.prompts import FORMATS, fill_in_prompt
from foretoken.serve.settings import ServerSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

PROMPT: dict[str, Any] = {"prompt": "def main(args):\n    x = ", "temperature": 0, "max_tokens": 12}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "def f(x):"}], "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def wide_server(wide_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model with a large vocabulary, and a chat template."""
    folder = shutil.copytree(wide_pair.target, tmp_path_factory.mktemp("chat") / "target")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with running(LLM(folder, wide_pair.draft, isolate_failures=True)) as found:
        yield found


@pytest.fixture(params=["server", "wide_server"])
def any_server(request: pytest.FixtureRequest) -> Running:
    found: Running = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("speculative_tokens", [0, 4])
def test_allowed_token_ids(any_server: Running, temperature: float, speculative_tokens: int) -> None:
    ids = [any_server.worker.llm.tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "c")]
    extra = {"temperature": temperature, "seed": 1, "speculative_tokens": speculative_tokens, "return_token_ids": True}
    for path, body in (("completions", PROMPT), ("chat/completions", CHAT)):
        got = any_server.post({**body, **extra, "allowed_token_ids": ids}, path).json()["choices"][0]
        assert set(got["token_ids"]) <= set(ids) and len(got["token_ids"]) == 12 and got["finish_reason"] == "length"
    assert error_of(any_server.post({**PROMPT, "allowed_token_ids": []}), 400)["param"] == "allowed_token_ids"
    assert "vocabulary" in error_of(any_server.post({**PROMPT, "allowed_token_ids": [10**6]}), 400)["message"]


def test_allowed_token_ids_that_leave_nothing(any_server: Running) -> None:
    digit = any_server.worker.llm.tokenizer.convert_tokens_to_ids("1")
    got = any_server.post({**PROMPT, "allowed_token_ids": [digit], "guided_choice": ["yes", "no"]})
    assert "guided_choice, allowed_token_ids" in error_of(got, 400)["message"]


def test_return_token_ids(any_server: Running) -> None:
    whole = any_server.post({**PROMPT, "return_token_ids": True}).json()["choices"][0]
    assert (
        whole["prompt_token_ids"] == any_server.worker.llm.tokenizer(PROMPT["prompt"])["input_ids"]
        and len(whole["token_ids"]) == 12
    )
    chat = any_server.post({**CHAT, "return_token_ids": True}, "chat/completions").json()
    tokenized = httpx.post(f"{any_server.url}/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["prompt_token_ids"] == tokenized["tokens"] and len(chat["choices"][0]["token_ids"]) == 12
    for path, body, wanted in (("completions", PROMPT, whole), ("chat/completions", CHAT, chat["choices"][0])):
        text = any_server.post({**body, "return_token_ids": True, "stream": True}, path).text
        chunks = chunks_of(text.split("\n\n"))
        ids = [token for chunk in chunks for c in chunk["choices"] for token in c.get("token_ids", ())]
        assert ids == wanted["token_ids"]
        first = chunks[0] if path.startswith("chat") else chunks[0]["choices"][0]
        assert first["prompt_token_ids"] == (chat if path.startswith("chat") else whole)["prompt_token_ids"]


def test_prompt_logprobs(any_server: Running) -> None:
    got = any_server.post({**PROMPT, "prompt_logprobs": 2, "return_token_ids": True}).json()["choices"][0]
    entries = got["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(got["prompt_token_ids"])
    for token, entry in zip(got["prompt_token_ids"][1:], entries[1:], strict=True):
        assert 2 <= len(entry) <= 3 and set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert sum(item["rank"] <= 2 for item in entry.values()) == 2
    echoed = any_server.post({**PROMPT, "echo": True, "logprobs": 0}).json()["choices"][0]["logprobs"]
    own = [None, *(e[str(t)]["logprob"] for t, e in zip(got["prompt_token_ids"][1:], entries[1:], strict=True))]
    assert echoed["token_logprobs"][: len(own)] == own
    chat = any_server.post({**CHAT, "prompt_logprobs": 0}, "chat/completions").json()
    assert chat["prompt_logprobs"][0] is None and all(len(entry) >= 1 for entry in chat["prompt_logprobs"][1:])
    assert error_of(any_server.post({**PROMPT, "prompt_logprobs": 21}), 400)["param"] == "prompt_logprobs"
    assert "streamed" in error_of(any_server.post({**PROMPT, "prompt_logprobs": 1, "stream": True}), 400)["message"]


def test_truncate_prompt_tokens(server: Running, llm: LLM) -> None:
    ids = llm.tokenizer(PROMPT["prompt"])["input_ids"]
    got = server.post({**PROMPT, "truncate_prompt_tokens": 3, "return_token_ids": True, "echo": True}).json()
    choice = got["choices"][0]
    assert choice["prompt_token_ids"] == ids[-3:] and choice["text"].startswith(llm.tokenizer.decode(ids[-3:]))
    long = {"messages": [{"role": "user", "content": "x = 1\n" * 20_000}], "max_tokens": 5}
    assert error_of(server.post(long, "chat/completions"), 400)["code"] == "context_length_exceeded"
    assert "at least 1" in error_of(server.post({**PROMPT, "truncate_prompt_tokens": 0}), 400)["message"]
    with running(LLM(zoo.path("draft"), dtype="float32", max_model_len=256)) as small:
        fitted = small.post({**long, "truncate_prompt_tokens": -1}, "chat/completions").json()
        assert fitted["usage"]["prompt_tokens"] == 256 - 5


def test_the_last_message_is_continued(server: Running, llm: LLM) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "    return x"}]
    asked = {**CHAT, "messages": messages, "continue_final_message": True, "return_token_ids": True}
    got = server.post(asked, "chat/completions").json()
    rendered = llm.tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert got["prompt_token_ids"] == llm.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    both = server.post({**asked, "add_generation_prompt": True}, "chat/completions")
    assert "exclude each other" in error_of(both, 400)["message"]
    bare = server.post({**CHAT, "add_generation_prompt": False, "return_token_ids": True}, "chat/completions").json()
    rendered = llm.tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=False, tokenize=False)
    assert bare["prompt_token_ids"] == llm.tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_cache_prompt(noisy: Path) -> None:
    asked = {**PROMPT, "prompt": "def again(x):\n    return x\n" * 30, "max_tokens": 2}
    with running(LLM(zoo.path("draft"), noisy, dtype="float32", enable_prefix_caching=True)) as server:
        counts = [
            server.post({**asked, **extra}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for extra in ({}, {"cache_prompt": True}, {"cache_prompt": False})
        ]
    assert counts[0] == counts[2] == 0 and counts[1] >= 64


def test_suffix_needs_a_model_that_fills_in(server: Running) -> None:
    error = error_of(server.post({**PROMPT, "suffix": "return x"}), 400)
    assert error["param"] == "suffix" and "no tokens for filling in" in error["message"]


@pytest.mark.parametrize("names", FORMATS)
def test_fill_in_prompts(names: tuple[str, str, str]) -> None:
    words = {word: number for number, word in enumerate(["?", "<s>", "a", "b", "c", "d"])}
    plain = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(words), unk_token="?")
    with pytest.raises(ApiError, match="no tokens for filling in"):
        fill_in_prompt(plain, "a", "b")
    plain.add_special_tokens({"additional_special_tokens": list(names)})
    before, after, middle = plain.convert_tokens_to_ids(list(names))
    assert fill_in_prompt(plain, "a b", "c d") == [before, 2, 3, after, 4, 5, middle]
    assert fill_in_prompt(plain, "", "") == [before, after, middle]


def word_tokenizer(words: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(words, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def test_tokenize_and_back(server: Running, llm: LLM) -> None:
    text = "def f(é):\n    return '日本'"
    got = httpx.post(f"{server.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = llm.tokenizer(text)["input_ids"]
    assert got == {
        "count": len(ids),
        "max_model_len": 8192,
        "tokens": ids,
        "token_strs": llm.tokenizer.convert_ids_to_tokens(ids),
    }
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json() == {"prompt": llm.tokenizer.decode(ids)}
    bare = httpx.post(f"{server.url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == llm.tokenizer(text, add_special_tokens=False)["input_ids"] and bare["token_strs"] is None
    long = httpx.post(
        f"{server.url}/tokenize", json={"prompt": text * 5000}, timeout=PATIENCE
    ).json()  # large, and long
    assert long["count"] > 8192
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": long["tokens"]}, timeout=PATIENCE).json()
    assert back["prompt"] == text * 5000


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("tokenize", {}, "either prompt or messages"),
        ("tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either prompt or messages"),
        ("tokenize", {"prompt": "x", "model": "other-model"}, "not served here"),
        ("tokenize", {"prompt": "x", "chat_template": "x"}, "--chat-template"),
        ("detokenize", {"tokens": [10**6]}, "integers from 0 to"),
        ("detokenize", {"tokens": "x"}, "valid list"),
    ],
)
def test_tokenize_refused(server: Running, path: str, body: Any, words: str) -> None:
    got = httpx.post(f"{server.url}/{path}", json=body)
    assert got.status_code in (400, 404) and words in got.json()["error"]["message"]


def test_ping_and_what_is_not_served(server: Running) -> None:
    assert httpx.get(f"{server.url}/ping").json() == httpx.post(f"{server.url}/ping").json() == {"status": "ok"}
    got = httpx.post(f"{server.url}/v1/embeddings", json={"input": "x", "model": "stdlib"})
    assert got.status_code == 404 and "generates text" in got.json()["error"]["message"]


def test_acceptance_stop_ends_loops_under_its_own_finish_reason(server, monkeypatch):
    monkeypatch.setattr("foretoken.core.verdict._ACCEPTED", 32)
    llm = LLM(zoo.path("draft"), speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    token = llm.tokenizer.convert_tokens_to_ids("a")
    loop = {"allowed_token_ids": [token], "speculative_method": "ngram", "temperature": 0, "ignore_eos": True}
    messages = {"messages": [{"role": "user", "content": "def f(x):"}]}
    body = {**PROMPT, **loop, "max_tokens": 200}
    assert server.post(body).json()["choices"][0]["finish_reason"] == "length"
    choice = server.post(body | {"acceptance_stop": ["repetition"]}).json()["choices"][0]
    assert choice["finish_reason"] == "repetition" and 32 < len(choice["text"]) < 64
    error = error_of(server.post(body | {"acceptance_stop": ["loop"]}), 400)
    assert error["param"].startswith("acceptance_stop")

    with running(llm, ServerSettings(acceptance_stop="none_accepted,repetition")) as stopping:
        reasons = {
            "chat/completions": lambda answer: answer["choices"][0]["finish_reason"],
            "messages": lambda answer: answer["stop_reason"],
            "responses": lambda answer: answer["incomplete_details"]["reason"],
        }
        for path, reason in reasons.items():
            limit = "max_output_tokens" if path == "responses" else "max_tokens"
            form = {"input": "def f(x):"} if path == "responses" else messages
            assert reason(stopping.post({**form, **loop, limit: 200}, path).json()) == "repetition"
            assert reason(stopping.post({**form, **loop, limit: 8}, path).json()) != "repetition"
    with pytest.raises(InvalidRequest, match="--acceptance-stop 'loop'; expected some of repetition"):
        ServerSettings(acceptance_stop="loop")
