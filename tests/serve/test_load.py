"""Many clients at once, of every kind, some of whom go away: each text is what it is alone and without speculation."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serve.conftest import PATIENCE, running

from foretoken import LLM, SamplingParams, zoo

SYSTEM = "import os\nimport sys\n\n\n" + "def helper(values):\n    return sorted(values)\n" * 12
PROMPTS = (SYSTEM + "def first(", SYSTEM + "class Second:\n", "x = 1\n" * 60, "def add(a, b):\n", "n = {'日本語': '🙂")
EXTRAS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 12, "min_p": 0.02},
    {"presence_penalty": 0.6},
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.4, "logit_bias": {"199": -1.5}},
    {"stop": ["\n\n", "def "]},
    {"ignore_eos": True},
    {"bad_words": ["self"]},
    {"speculative_tokens": 7},
    {"speculative_tokens": 0},
    {"speculative_method": "ngram"},
    {"structured_outputs": {"regex": r"[a-z]{3,12}( [0-9]{1,4}){0,6}"}},
    {"min_tokens": 5},
    {},
)
MORE = ("prompt", "stream", "speculative_method")


@pytest.mark.slow
def test_each_text_is_its_own(noisy: Path) -> None:
    rng = random.Random(4)
    bodies = [
        {
            "prompt": rng.choice(PROMPTS),
            "max_tokens": rng.randint(1, 60),
            "temperature": rng.choice((0.0, 0.8, 1.1)),
            "seed": number,
            "stream": True,
            **rng.choice(EXTRAS),
        }
        for number in range(40)
    ]
    leaving = [rng.randint(1, 4) if rng.random() < 0.2 else None for _ in bodies]
    llm = LLM(
        zoo.path("draft"),
        noisy,
        dtype="float32",
        methods=("ngram",),
        max_num_seqs=6,
        max_model_len=768,
        kv_cache_memory_bytes=2600 * 3_700,
        enable_prefix_caching=True,
        max_num_batched_tokens=48,
    )
    with running(llm) as server:
        texts = asyncio.run(crowd(f"{server.url}/v1/completions", bodies, leaving))
        server.until(server.idle)
        llm.engine.check_integrity()
        assert llm.engine.usage.prefix_hits > 0
    alone = LLM(zoo.path("draft"), dtype="float32", speculative_config={"method": "none"}, max_model_len=768)
    for body, text in zip(bodies, texts, strict=True):
        if text is not None:
            own = SamplingParams(**{key: value for key, value in body.items() if key not in MORE})
            assert text == alone.generate(body["prompt"], own)[0].outputs[0].text, body


async def crowd(url: str, bodies: list[dict[str, Any]], leaving: list[int | None]) -> list[str | None]:
    places = asyncio.Semaphore(16)
    async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
        return await asyncio.gather(
            *(ask(client, places, url, body, leave) for body, leave in zip(bodies, leaving, strict=True))
        )


async def ask(
    client: httpx.AsyncClient, places: asyncio.Semaphore, url: str, body: dict[str, Any], leave: int | None
) -> str | None:
    """The text; None if the client left after this number of chunks."""
    async with places, client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        text, chunks = "", 0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                chunks += 1
            if leave is not None and chunks >= leave:
                return None
        return text
