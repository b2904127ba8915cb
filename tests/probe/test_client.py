"""Requests: what is tried again, what is kept, what is distinguished."""

import contextlib
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.audit.endpoint.fake import Behaviour, listening, serving
from tests.audit.endpoint.tasks import QUICK

from foretoken.core.errors import WriteError
from foretoken.probe import client as client_module
from foretoken.probe.answers import OTHER, Failed, Refused, ServerAnswer, TokenPlace, answer_of
from foretoken.probe.client import Ask, EndpointClient, Journal

BODY = {"model": "table", "prompt": "a", "max_tokens": 3, "temperature": 0.0, "logprobs": 2}


def ask(tag: str, **fields: object) -> Ask:
    return Ask(BODY | fields, tag, 2)


def test_a_limited_request_is_tried_again():
    with serving(Behaviour(trouble="limits once")) as url:
        client = EndpointClient(url, patience=QUICK)
        (reply,) = client.post("completions", [ask("a")], 1)
    assert isinstance(reply, ServerAnswer) and len(reply.text) == 3
    assert client.spent.requests == 2 and client.spent.retries == 1 and client.spent.tokens == 3


def test_after_failures_in_a_row_nothing_more_is_sent():
    behaviour = Behaviour(trouble="fails")
    with serving(behaviour) as url:
        replies = EndpointClient(url, patience=QUICK).post("completions", [ask(str(i)) for i in range(20)], 1)
    assert all(isinstance(reply, Failed) for reply in replies)
    assert len(behaviour.seen) == 9 and "not sent" in replies[-1].why


def test_a_refusal_is_not_tried_again():
    behaviour = Behaviour(refused=("logprobs",))
    with serving(behaviour) as url:
        (reply,) = EndpointClient(url, patience=QUICK).post("completions", [ask("a")], 1)
    assert reply == Refused("400: logprobs is not supported") and len(behaviour.seen) == 1


def test_a_stream_is_put_together():
    with serving(Behaviour()) as url:
        client = EndpointClient(url, patience=QUICK)
        whole, parts = client.post("completions", [ask("a"), ask("a", stream=True)], 2)
    assert parts.text == whole.text and parts.finish == whole.finish == "length" and parts.tokens == 3


def test_answers_survive_the_process(tmp_path):
    file, behaviour = tmp_path / "audit.partial", Behaviour()
    with serving(behaviour) as url:
        first = EndpointClient(url, patience=QUICK, journal=Journal(ServerAnswer, file))
        before = first.post("completions", [ask("a"), ask("b", prompt_logprobs=2)], 1)
        first.journal.close(finished=False)
        file.write_text(file.read_text() + '{"key": "half a li')
        later = EndpointClient(url, patience=QUICK, journal=Journal(ServerAnswer, file))
        again = later.post("completions", [ask("a"), ask("b", prompt_logprobs=2), ask("c")], 1)
        later.journal.close(finished=True)
    assert again[:2] == before and len(behaviour.seen) == 3
    assert later.spent.resumed == 2 and later.spent.requests == 1
    assert not file.exists()


def test_a_journal_that_cannot_be_kept(tmp_path):
    with pytest.raises(WriteError, match="cannot keep answers"):
        Journal(ServerAnswer, tmp_path / "nowhere" / "audit.partial")


def test_names_of_tokens():
    """Texts that several tokens share have one name, which is never among the likeliest."""
    tokens = ["a", "\ufffd", "<|end|>", ""]
    logprobs = {
        "tokens": tokens,
        "token_logprobs": [-1.0] * 4,
        "top_logprobs": [{"a": -1.0, "\ufffd": -2.0, "</s>": -0.5}] * 4,
    }
    answer = answer_of({"choices": [{"text": "a", "finish_reason": "stop", "logprobs": logprobs}]}, 3)
    assert [place.token for place in answer.places] == ["a", OTHER, OTHER, OTHER]
    assert {place.top for place in answer.places} == {(("a", -1.0),)}


def test_ids_of_llama_cpp():
    row = {"id": 7, "token": "x", "logprob": -0.1, "top_logprobs": [{"id": 7, "token": "x", "logprob": -0.1}]}
    choice = {"text": "x", "finish_reason": "length", "logprobs": {"content": [row]}}
    answer = answer_of({"choices": [choice], "timings": {"draft_n": 5}}, 3)
    assert answer.ids == (7,) and answer.places == (TokenPlace("7", -0.1, (("7", -0.1),)),) and answer.drafted == 5


@contextlib.contextmanager
def pages(body: bytes, pause: float = 0.0):
    """A server whose every page is this one, sent slowly if a pause after every byte is given."""

    class Handler(BaseHTTPRequestHandler):
        def _page(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for part in [body[i : i + 1] for i in range(len(body))] if pause else [body]:
                    self.wfile.write(part)
                    time.sleep(pause)

        do_GET = do_POST = _page

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    with listening(server) as address:
        yield address


def test_a_page_that_is_slow_or_long_is_none(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(client_module, "_PAGE_BYTES", 50)
        with pages("50 \u20ac".encode()) as url:
            assert EndpointClient(url).get("/metrics") == "50 \u20ac"
        with pages(b"x" * 51) as url:
            assert EndpointClient(url).get("/metrics") == ""
    monkeypatch.setattr(client_module, "_PAGE_SECONDS", 0.3)
    with pages(b"x" * 2_000, pause=0.05) as url:
        began = time.perf_counter()
        assert EndpointClient(url).get("/metrics") == ""
        assert time.perf_counter() - began < 60, "the whole page takes 100 s"


@pytest.mark.parametrize(
    "body",
    [
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1e999}}',
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": -1}}',
        '{"choices": [{"text": "a", "token_ids": [1e999]}]}',
        '{"choices": [{"text": "a"}], "timings": {"draft_n": 1e999}}',
        '{"choices": [{"text": "a"}], "metrics": {"speculative_decoding": '
        '{"num_draft_tokens": 1, "num_spec_steps": "x"}}}',
        "[" * 100_000,
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_absurd_answer_is_a_failure(body, stream):
    sent = f"data: {body}\n\ndata: [DONE]\n\n" if stream else body
    with pages(sent.encode()) as url:
        (reply,) = EndpointClient(url, patience=QUICK).post("completions", [ask("a", stream=stream)], 1)
    assert isinstance(reply, Failed)
