"""Answers like ``llama-server``, counting upwards; speculation accepts two of three tokens."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "prompt" not in body:
            self._reply(400, {"error": {"message": "no prompt"}})
            return
        count, last = body["n_predict"], body["prompt"][-1]
        timings: dict[str, Any] = {"prompt_ms": 20.0, "predicted_ms": 5.0 * count, "predicted_n": count}
        if "--spec-type" in sys.argv:
            timings |= {"draft_n": count, "draft_n_accepted": 2 * count // 3}
        tokens = list(range(last + 1, last + 1 + count))
        self._reply(200, {"tokens": tokens, "timings": timings, "asked": body, "args": sys.argv[1:]})

    def _reply(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return


if "--version" in sys.argv:
    print("version: 0.5.0-dev (build 0, commit unknown)")
    sys.exit()
if "broken.gguf" in sys.argv:
    print("load_model: failed to load model, 'broken.gguf'", file=sys.stderr)
    sys.exit(1)
server = HTTPServer(("127.0.0.1", 0), Handler)
print(f"srv main: listening on http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
