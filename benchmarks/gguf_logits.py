"""Logits of GGUF files beside llama.cpp's on the same files, and token ids beside its tokenizer's.

For each file type, the target is written as GGUF by llama.cpp's own tools. Both systems then predict the token after
every position of one text, and the total variation of their distributions is shown. Both quantize activations, each in
its own way, so both are also compared with a model of the same dequantized weights in float32. Exits with 1 where the
mean total variation between the systems is over the limit, or where a text has other token ids.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from foretoken import zoo
from foretoken.bench.output import cores, listing, report
from foretoken.bench.peers import export
from foretoken.bench.peers.llamacpp import LlamaServer
from foretoken.bench.peers.registry import GGUF_TYPES, PEERS
from foretoken.bench.workloads import CONTEXTS, FUNCTIONS, ragged
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.formats.gguf.families import config_of
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.weights import GGUFWeights
from foretoken.models.loading import load_model
from foretoken.plan.texts import SampledText, text_logits
from options import Output

TYPES = tuple(kind for kind in GGUF_TYPES if not kind.endswith(("_S", "_L")))
COLUMNS = {
    "type": "{kind}",
    "stored as": "{stored_as}",
    "positions": "{positions}",
    "TV mean": "{systems[mean]:.4f}",
    "TV max": "{systems[maximum]:.3f}",
    "same top": "{systems[same_top]:.1%}",
    "ours from float32": "{ours[mean]:.4f}",
    "llama.cpp from float32": "{theirs[mean]:.4f}",
}
PEER = PEERS["llamacpp"]


def distance(left: Tensor, right: Tensor) -> dict[str, float]:
    """Returns the total variation over all positions, and the share of positions with the same most likely token.

    left, right: log-probabilities [n, V].
    """
    values = (left.exp() - right.exp()).abs().sum(-1) / 2
    same = (left.argmax(-1) == right.argmax(-1)).double().mean()
    return {"mean": float(values.mean()), "maximum": float(values.max()), "same_top": float(same)}


def our_logprobs(path: Path, ids: list[int], dtype: str) -> Tensor:
    """Returns the log-probabilities [n, V] of the token after each of ``ids`` [n], in float64."""
    text = SampledText(tuple(ids[:1]), (*ids[1:], ids[0]), len(ids))  # the last token is not read
    return text_logits(load_model(path, dtype=dtype), text).double().log_softmax(-1)


def their_logprobs(server: LlamaServer, ids: list[int], vocabulary: int) -> Tensor:
    """Returns the same of llama.cpp, which decodes one position after the other."""
    result = torch.full((len(ids), vocabulary), float("-inf"), dtype=torch.float64)
    for at in range(len(ids)):
        body = {"prompt": ids[: at + 1], "n_predict": 1, "n_probs": vocabulary, "cache_prompt": True}
        reply = server.post("/completion", body | {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0})
        for token in reply["completion_probabilities"][0]["top_logprobs"]:
            result[at, token["id"]] = token["logprob"]
    return result


def dequantized(path: Path, folder: Path) -> Path:
    """Writes the values of a GGUF file as a float32 checkpoint. Returns its folder."""
    weights = GGUFWeights(path)
    folder.mkdir()
    save_file({name: weights[name].float().contiguous() for name in weights}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(Header.read(path))), encoding="utf-8")
    return folder


def start(path: Path, length: int) -> LlamaServer:
    sizes = ["--ctx-size", str(length), "--parallel", "1", "--threads", str(cores())]
    return LlamaServer([str(PEER.place / PEER.program), "--model", str(path), *sizes], io.StringIO())


def compare(path: Path, kind: str, ids: list[int], dtype: str) -> dict[str, Any]:
    """Returns the distances of one file. llama-quantize replaces types whose blocks do not fit a matrix."""
    server = start(path, len(ids) + 8)
    try:
        theirs = their_logprobs(server, ids, config_of(Header.read(path))["vocab_size"])
    finally:
        server.close()
    ours = our_logprobs(path, ids, dtype)
    with tempfile.TemporaryDirectory() as temporary:
        exact = our_logprobs(dequantized(path, Path(temporary) / "model"), ids, "float32")
    matrices = (t.kind.name for t in Header.read(path).tensors.values() if len(t.shape) == 2)
    stored = dict(Counter(matrices).most_common())
    distances = {"systems": (ours, theirs), "ours": (ours, exact), "theirs": (theirs, exact)}
    row = {"kind": kind, "stored": stored, "positions": len(ids)}
    row["stored_as"] = ", ".join(f"{count} {name}" for name, count in stored.items())
    return row | {name: distance(*pair) for name, pair in distances.items()}


def texts(count: int) -> Iterator[str]:
    """Yields pieces of library source, and random characters of all of Unicode."""
    numbers = random.Random(0)
    source = "".join(Path(sys.modules[name].__file__ or "").read_text(encoding="utf-8") for name in modules())
    for number in range(count):
        if number % 4 == 3:
            codes = (numbers.choice((0x7F, 0x2FF, 0xFFFF, 0x10FFFF)) for _ in range(numbers.randrange(1, 40)))
            characters = (chr(numbers.randrange(1, top)) for top in codes)
            yield "".join(c for c in characters if not 0xD800 <= ord(c) < 0xE000)
        else:
            at = numbers.randrange(len(source))
            yield source[at : at + numbers.randrange(1, 400)]


def modules() -> tuple[str, ...]:
    """Imports modules of the standard library and returns their names."""
    for name in CONTEXTS:
        __import__(name)
    return CONTEXTS


def tokenizer_differences(path: Path, count: int) -> list[str]:
    """Returns the texts whose ids differ from llama.cpp's."""
    tokenizer, server = load_tokenizer(path), start(path, 64)
    try:
        different = []
        for text in texts(count):
            body = {"content": text, "add_special": False, "parse_special": True}
            theirs = server.post("/tokenize", body)["tokens"]
            if list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) != theirs:
                different.append(text)
        return different
    finally:
        server.close()


def main(
    target: Annotated[Path | None, typer.Option(help="Folder of a checkpoint. [the bundled target]")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="File type (repeatable). [all]")] = None,
    positions: Annotated[int, typer.Option(min=1)] = 300,
    text_count: Annotated[int, typer.Option("--texts", min=0, help="Texts to tokenize.")] = 10_000,
    dtype: Annotated[str, typer.Option(help="dtype of our runtime.")] = "auto",
    limit: Annotated[float, typer.Option(help="Largest mean total variation.")] = 0.01,
    output: Output = None,
) -> None:
    """Compare the logits of GGUF files, and the ids of texts, with llama.cpp's."""
    if PEER.missing:
        sys.exit(f"gguf_logits: llama.cpp is not set up ({PEER.missing} is missing); `make peers` does it")
    source = target or zoo.path("target")
    tokenizer = load_tokenizer(source)
    ids = ragged(lambda text: list(tokenizer.encode(text)), len(FUNCTIONS), 20, positions)
    longest = max(ids, key=len)
    kinds = tuple(kind or TYPES)
    different = tokenizer_differences(export.gguf(source, kinds[0]), text_count) if text_count else []
    rows = [compare(export.gguf(source, name), name, longest, dtype) for name in kinds]
    said = f"{text_count} texts tokenized, {len(different)} with other ids than llama.cpp's"
    report([listing(COLUMNS, rows), said], {}, output, rows=rows, texts=text_count, different_texts=different)
    if different or any(row["systems"]["mean"] > limit for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
