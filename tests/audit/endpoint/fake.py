"""An OpenAI-compatible server of a table of probabilities, with speculation that can be wrong in ten ways.

Tokens are characters. A request with ``"speculative_tokens": 0`` is decoded plainly and never wrong.
"""

import contextlib
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

ALPHABET = "etaoinshrdlu_ (){}=.,:+-*xyz\n0129"
SIZE, DEPTH = len(ALPHABET), 3

FAULTS = (
    "residual",  # a rejected token is replaced by a sample from p
    "temperature",  # ignored
    "top_p",  # dropped when drafting
    "bonus",  # sampled from the draft
    "logprobs",  # those of the draft
    "stop",  # looked for only at the end of a step
    "seed",  # ignored
    "greedy",  # a draft is accepted if it is among the best two
    "penalties",  # do not see the tokens of the step
    "length",  # a step's last tokens may exceed it
)


def _table(seed: int, blend: np.ndarray | None = None) -> np.ndarray:
    logits = np.random.default_rng(seed).gumbel(size=(SIZE, SIZE)) * 1.6
    return logits if blend is None else 0.5 * blend + 0.5 * logits


TARGET = _table(1)
DRAFT = _table(2, TARGET)


@dataclass
class Behaviour:
    """Behaviour of the server. fault: of ``FAULTS``. trouble: what happens to requests after ``healthy`` of them."""

    fault: str = ""
    trouble: str = ""
    healthy: int = 0
    owner: str = "foretoken"
    refused: tuple[str, ...] = ()
    chat_only: bool = False
    key: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    times: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Decoder:
    """One completion."""

    def __init__(self, prompt: list[int], body: dict[str, Any], fault: str, rng: np.random.Generator) -> None:
        self.prompt, self.body, self.fault, self.rng = prompt, body, fault, rng
        self.text: list[int] = []
        self.drafted = 0

    def law(self, table: np.ndarray, ahead: list[int], verified: bool = False) -> np.ndarray:
        """The distribution after the text and ``ahead``. verified: a place of the draft, not the bonus."""
        body, text = self.body, [*self.text, *ahead]
        logits = table[(text or self.prompt or [0])[-1]].copy()
        counted = self.text if self.fault == "penalties" else text
        counts = np.bincount(counted, minlength=SIZE)
        seen = np.bincount([*self.prompt, *counted], minlength=SIZE) > 0
        penalty = body.get("repetition_penalty", 1.0)
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
        logits -= body.get("presence_penalty", 0.0) * (counts > 0) + body.get("frequency_penalty", 0.0) * counts
        for token, bias in body.get("logit_bias", {}).items():
            logits[int(token)] += bias
        for word in body.get("bad_words", ()):
            if "".join(ALPHABET[i] for i in text).endswith(word[:-1]):
                logits[ALPHABET.index(word[-1])] = -np.inf
        temperature = body.get("temperature", 1.0)
        if temperature == 0.0:
            return np.eye(SIZE)[logits.argmax()]
        probs = _softmax(logits / (1.0 if self.fault == "temperature" and verified else temperature))
        return self._filtered(probs, self.fault == "top_p" and verified) if _filters(body) else probs

    def _filtered(self, probs: np.ndarray, no_top_p: bool) -> np.ndarray:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        keep = probs >= self.body.get("min_p", 0.0) * probs.max()
        if not no_top_p:
            keep[order[before >= self.body.get("top_p", 1.0)]] = False
        if self.body.get("top_k", 0) > 0:
            keep[order[self.body["top_k"] :]] = False
        return np.where(keep, probs, 0.0) / probs[keep].sum()

    def sample(self, probs: np.ndarray) -> int:
        return int(np.searchsorted(probs.cumsum(), self.rng.random() * probs.sum(), side="right"))

    def run(self, speculate: bool) -> str:
        """Decodes. Returns the finish reason."""
        limit, finish = int(self.body.get("max_tokens", 16)), ""
        while not finish:
            fresh = self.step() if speculate else [self.sample(self.law(TARGET, []))]
            for number, token in enumerate(fresh):
                self.text.append(token)
                if self.fault != "stop" or number + 1 == len(fresh):
                    finish = self.stopped()
                if not finish and len(self.text) >= limit and (self.fault != "length" or number + 1 == len(fresh)):
                    finish = "length"
                if finish:
                    break
        return finish

    def step(self) -> list[int]:
        drafted: list[int] = []
        for _ in range(DEPTH):
            drafted.append(self.sample(self.law(DRAFT, drafted, True)))
        self.drafted += DEPTH
        accepted: list[int] = []
        for token in drafted:
            p, q = self.law(TARGET, accepted, True), self.law(DRAFT, accepted, True)
            good = self.rng.random() * q[token] < p[token]
            if self.fault == "greedy" and self.body.get("temperature") == 0.0:
                row = TARGET[[*(self.text or self.prompt or [0]), *accepted][-1]]
                good = token in np.argsort(-row)[:2]
            if not good:
                residual = np.maximum(p - q, 0.0) if self.fault != "residual" else p
                return [*accepted, self.sample(residual / residual.sum() if residual.sum() > 0 else p)]
            accepted.append(token)
        return [*accepted, self.sample(self.law(DRAFT if self.fault == "bonus" else TARGET, accepted))]

    def stopped(self) -> str:
        stops = self.body.get("stop") or []
        if any(stop in self.string for stop in stops):
            if self.fault != "stop":
                cut = min(self.string.find(stop) for stop in stops if stop in self.string)
                self.text = self.text[:cut]
            return "stop"
        return "stop" if self.text[-1] in (self.body.get("stop_token_ids") or []) else ""

    @property
    def string(self) -> str:
        return "".join(ALPHABET[token] for token in self.text)


def _filters(body: dict[str, Any]) -> bool:
    return body.get("top_p", 1.0) < 1.0 or body.get("min_p", 0.0) > 0.0 or body.get("top_k", 0) > 0


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@cache
def _row(drafted: bool, before: int) -> tuple[list[float], list[int]]:
    """The log-probabilities after a token, and the tokens from the likeliest down."""
    row = np.log(_softmax((DRAFT if drafted else TARGET)[before]))
    return row.tolist(), np.argsort(-row).tolist()


def _logs(drafted: bool, before: int, top: int, own: int) -> dict[int, float]:
    row, order = _row(drafted, before)
    return {token: row[token] for token in [own, *order[:top]]}


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, said in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, said)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return

    def troubled(self, trouble: str) -> bool:
        """Whether the request is lost to a trouble of any server."""
        match trouble:
            case "fails":
                self.send(500, b'{"error": {"message": "out of memory"}}')
            case "limits":
                self.send(429, b'{"error": {"message": "slow down"}}', {"Retry-After": "0"})
            case "stalls":
                time.sleep(10.0)
                self.close_connection = True
            case _:
                return False
        return True


class Handler(QuietHandler):
    wbufsize = -1  # one packet for head and body, else the client waits for the second
    disable_nagle_algorithm = True  # the second packet of a long answer would wait for a delayed acknowledgement
    behaviour: Behaviour

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._send(404, {})
            return
        self._send(200, {"data": [{"id": "table", "owned_by": self.behaviour.owner}]})

    def do_POST(self) -> None:
        behaviour = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with behaviour.lock:
            behaviour.seen.append(body)
            number = len(behaviour.seen)
        if behaviour.key is not None and self.headers.get("Authorization") != f"Bearer {behaviour.key}":
            self._send(401, {"error": {"message": "a wrong key"}})
        elif self.path != ("/v1/chat/completions" if behaviour.chat_only else "/v1/completions"):
            self._send(404, {"error": {"message": "no such path"}})
        elif wrong := [name for name in behaviour.refused if name in body]:
            self._send(400, {"error": {"message": f"{wrong[0]} is not supported"}})
        elif number > behaviour.healthy and self._troubled(body):
            return
        else:
            self._send(200, self._answer(body), body.get("stream", False))

    def _troubled(self, body: dict[str, Any]) -> bool:
        """Whether the request is lost."""
        match self.behaviour.trouble:
            case "limits once" if json.dumps(body) not in self.server.limited:  # type: ignore[attr-defined]
                self.server.limited.add(json.dumps(body))  # type: ignore[attr-defined]
                return self.troubled("limits")
            case "closes" | "closes streams" if body.get("stream") or self.behaviour.trouble == "closes":
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                self.wfile.write(b'data: {"choices": []}\n\n' if body.get("stream") else b'{"choices": ')
                self.close_connection = True
            case "garbage":
                self._send(200, {"choices": []})
            case trouble:
                return self.troubled(trouble)
        return True

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        chat = self.behaviour.chat_only
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        ids = [max(0, ALPHABET.find(c)) for c in prompt] if isinstance(prompt, str) else prompt
        speculate = body.get("speculative_tokens") != 0
        fault = self.behaviour.fault if speculate else ""
        choices, drafted = [], 0
        for index in range(body.get("n", 1)):
            unseeded = fault == "seed" or "seed" not in body
            seed = [*self._again(body), index] if unseeded else body["seed"] + index
            decoder = Decoder(ids, body, fault, np.random.default_rng(seed))
            finish = decoder.run(speculate)
            drafted += decoder.drafted
            choices.append(self._choice(index, decoder, finish, fault))
        usage = {"prompt_tokens": len(ids), "completion_tokens": sum(len(c["token_ids"]) for c in choices)}
        metrics = {"speculative_decoding": {"num_draft_tokens": drafted}}
        return {"choices": choices, "usage": usage, "metrics": metrics}

    def _again(self, body: dict[str, Any]) -> tuple[int, int]:
        """A number for a body, and how often it came before: every run of the tests samples the same texts."""
        key = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        with self.behaviour.lock:
            self.behaviour.times[key] += 1
            return key, self.behaviour.times[key]

    def _choice(self, index: int, decoder: Decoder, finish: str, fault: str) -> dict[str, Any]:
        body, text = decoder.body, decoder.string
        if "structured_outputs" in body:
            text, finish = '{"colour": "red", "bright": true}', "stop"
        drafted, lie = fault == "logprobs", 1.0 if self.behaviour.trouble == "lies" else 0.0
        before = [(decoder.prompt or [0])[-1], *decoder.text][: len(decoder.text)]
        top = body.get("top_logprobs", 0) if self.behaviour.chat_only else body.get("logprobs")
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "token_ids": decoder.text}
        rows = [_logs(drafted, b, top or 0, own) for b, own in zip(before, decoder.text, strict=True)]
        if self.behaviour.chat_only:
            entries = [[{"token": ALPHABET[t], "logprob": v + lie} for t, v in row.items()] for row in rows]
            best = [sorted(row, key=lambda entry: -entry["logprob"])[: top or 0] for row in entries]
            content = [{**row[0], "top_logprobs": likeliest} for row, likeliest in zip(entries, best, strict=True)]
            choice |= {"message": {"content": text}, "logprobs": {"content": content} if top else None}
            return choice
        choice |= {"text": text, "prompt_token_ids": decoder.prompt}
        if top is not None:
            choice["logprobs"] = {
                "tokens": list(decoder.string),
                "token_logprobs": [row[own] + lie for row, own in zip(rows, decoder.text, strict=True)],
                "top_logprobs": [{ALPHABET[t]: v + lie for t, v in row.items()} for row in rows],
            }
        if "prompt_logprobs" in body:
            told = [
                {str(t): {"logprob": v + lie} for t, v in _logs(False, b, body["prompt_logprobs"], own).items()}
                for b, own in zip(decoder.prompt, decoder.prompt[1:], strict=False)
            ]
            choice["prompt_logprobs"] = [None, *told]
        return choice

    def _send(self, status: int, value: Any, stream: bool = False) -> None:
        if stream:
            choice = value["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            parts = [{"choices": [{"text": c, "finish_reason": None}]} for c in text]
            parts.append({"choices": [{"text": "", "finish_reason": choice["finish_reason"]}], "usage": value["usage"]})
            content = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
        else:
            content = json.dumps(value).encode()
        self.send(status, content)


class ThreadedServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # with 5, some of eight clients who connect at once would try again a second later


@contextlib.contextmanager
def listening(server: ThreadingHTTPServer) -> Iterator[str]:
    """Runs a server that was made. Yields its address."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """Runs a server. Yields its address."""
    handler = type("FakeHandler", (Handler,), {"behaviour": behaviour})
    server = ThreadedServer(("127.0.0.1", 0), handler)
    server.limited = set()  # type: ignore[attr-defined]
    with listening(server) as address:
        yield address
