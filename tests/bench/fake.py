"""A peer that counts: started like a real one, with no library behind it."""

import os
import subprocess
import sys
import time

from foretoken.bench.peers.protocol import Answer, Complete, PeerRequest, Setup, serve


def load(setup: Setup) -> tuple[Complete, str]:
    if setup.method == "broken":
        raise ValueError("no such model")
    if setup.method == "crash":
        print("out of memory", file=sys.stderr)
        os._exit(3)
    if setup.method == "parent":
        hold = "kept = b'1' * 40 * 2**20; print(flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
    print("a library that prints to standard output")

    def complete(ask: PeerRequest) -> Answer:
        if ask.max_tokens == 13:
            raise ValueError("thirteen")
        if setup.method == "sleeps":
            time.sleep(0.2)
        tokens = [[prompt[-1] + i for i in range(ask.max_tokens)] for prompt in ask.prompts]
        return Answer(tokens, 1.0 / (1 + ask.depth), 0.1, len(tokens), max(1, ask.max_tokens // (1 + ask.depth)))

    return complete, "1.0"


if __name__ == "__main__":
    serve(load)
