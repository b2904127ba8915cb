"""The attacks of ``attacks.py``, each in its own process, so that preparing it does not disturb the measurement.

    python benchmarks/attackers.py "big prompt" http://127.0.0.1:8000

It prints "ready", waits for a line, attacks, and prints as JSON the number of answers by status. Only loopback
addresses are attacked. It needs the standard library alone.
"""

import ipaddress
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 120.0  # seconds that an answer may take
SIZE = 3_900_000  # bytes of a body that the server's default limit just lets through
HEADER = 64 * 2**20  # bytes of one header line, if the server keeps reading
CONNECTIONS = 512
HELD = 3.0  # seconds that unfinished requests are held

Address = tuple[str, int]
Send = Callable[[Address], Counter[str]]


@dataclass(frozen=True)
class Attack:
    """One attack. prepare: makes what is sent. answers: all that may come back; see ``status``."""

    prepare: Callable[[], Send]
    answers: frozenset[str]


def post(path: str = "/v1/completions", host: str = "localhost", **fields: Any) -> Send:
    """One request with these fields."""
    return raw(json.dumps({"max_tokens": 8, **fields}).encode(), path, host)


def raw(body: bytes, path: str = "/v1/completions", host: str = "localhost") -> Send:
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"

    def send(address: Address) -> Counter[str]:
        with socket.create_connection(address, timeout=PATIENCE) as connection:
            with suppress(OSError):  # it may be refused before it is read
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return Counter([status(connection)])

    return send


def status(connection: socket.socket) -> str:
    """Returns the status of a complete answer; "closed" if the connection ended without one."""
    read = b""
    with suppress(OSError):
        while part := connection.recv(2**16):
            read += part
    return read[9:12].decode() if read.startswith(b"HTTP/1.1 ") else "closed"


def words(size: int) -> str:
    """Returns ``size`` characters of text without repetition."""
    rng = random.Random(0)
    return " ".join(f"{rng.getrandbits(40):010x}" for _ in range(size // 11))


def endless_header(address: Address) -> Counter[str]:
    """Sends one endless header line until the server closes the connection."""
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        with suppress(OSError):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ")
            for _ in range(HEADER // 2**16):
                connection.sendall(b"a" * 2**16)
        return Counter([status(connection)])


def unfinished(sent: bytes) -> Send:
    """Returns a function that opens connections which stop after ``sent``, and counts the answers of another client."""
    other = post(prompt="x = ")

    def send(address: Address) -> Counter[str]:
        answers: Counter[str] = Counter()
        with ExitStack() as stack:
            for _ in range(CONNECTIONS):
                connection = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
                connection.sendall(sent)
            end = time.monotonic() + HELD
            while time.monotonic() < end:
                answers += other(address)
                time.sleep(0.2)
        return answers

    return send


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SLOW = HEAD + b'Content-Length: 4000000\r\n\r\n{"prompt": "'
NESTED = "root ::= " + "(" * 200 + '"a"' + '{0,40} "b")?' * 200
WIDE = {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(3000)]}
CHAT = "/v1/chat/completions"

LONG_PROMPT = "long prompt"  # of 4,000 tokens, which are computed
OK, BAD = frozenset({"200"}), frozenset({"400"})
ATTACKS: dict[str, Attack] = {
    "big prompt": Attack(lambda: post(prompt=words(SIZE)), BAD),
    "big chat": Attack(lambda: post(CHAT, messages=[{"role": "user", "content": words(SIZE)}]), BAD),
    "big prediction": Attack(lambda: post(prompt="x", prediction={"type": "content", "content": words(SIZE)}), BAD),
    "a million token ids": Attack(lambda: post(prompt=[7] * 10**6), BAD),
    "100,000 choices": Attack(lambda: post(prompt="x", guided_choice=[f"choice {i}" for i in range(10**5)]), OK),
    "300,000 bad words": Attack(lambda: post(prompt="x", bad_words=[f"w{i}" for i in range(3 * 10**5)]), BAD),
    "100,000 bad words": Attack(lambda: post(prompt="x", bad_words=[f"w{i}" for i in range(10**5)]), OK),
    "nested grammar": Attack(lambda: post(prompt="x", guided_grammar=NESTED), OK | BAD),
    "wide schema": Attack(lambda: post(prompt="x", guided_json=WIDE), OK | BAD),
    "endless header": Attack(lambda: endless_header, frozenset({"431", "closed"})),
    "unfinished headers": Attack(lambda: unfinished(HEAD), OK),
    "unfinished bodies": Attack(lambda: unfinished(SLOW), OK),
    "128 prompts, n=64": Attack(lambda: post(prompt=["x"] * 128, n=64), BAD),
    "foreign host": Attack(lambda: post(host="evil.example", prompt="x"), frozenset({"403"})),
    "deep JSON": Attack(lambda: raw(b'{"prompt": "x", "guided_json": ' + b'{"a":' * 700_000), BAD),
    "wide JSON": Attack(lambda: raw(b'{"prompt": "x", "guided_json": [' + b"[]," * 1_200_000 + b"1]}"), BAD),
    LONG_PROMPT: Attack(lambda: post(prompt=[random.randrange(100, 3100) for _ in range(4000)], max_tokens=1), OK),
    "a million wrong items": Attack(lambda: post(prompt=[1, "a"] * 500_000), BAD),
}


def main() -> None:
    name, url = sys.argv[1:]
    target = urlsplit(url)
    assert target.hostname is not None and target.port is not None
    if not ipaddress.ip_address(target.hostname).is_loopback:
        raise SystemExit(f"only loopback addresses are attacked, not {target.hostname}")
    send = ATTACKS[name].prepare()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(send((target.hostname, target.port))))


if __name__ == "__main__":
    main()
