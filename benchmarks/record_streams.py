"""Records the token streams on which tests/control replays the draft policy.

    python benchmarks/record_streams.py --output tests/control/streams.json

Four kinds of text (code, editing, repetition, chat) of the bundled pair, and of a real model with its EAGLE-3 head. Of
each token it keeps what the draft model or head would have done there: the probability of its likeliest token, whether
that token is right, and the probability that a sampled draft token is accepted.
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.editing import EDITS
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.draft import Draft
from foretoken.engine.prompts import apply_template
from foretoken.models.base import Model
from foretoken.models.heads.eagle import EagleNet
from foretoken.models.heads.loading import LoadedHead, load_eagle
from foretoken.plan.texts import SampledText, text_logits
from real_models import real_model_path

Distributions = Callable[[list[int], list[int]], torch.Tensor]  # of a prompt and tokens: [N, V], before each token
QUESTION = "Explain in four paragraphs why the sky is blue, and why sunsets are red."
LINE = "- {0}: the {1} was checked, no problems were found\n"
PARTS = ("door", "window", "roof", "cellar", "lift", "kitchen", "garden", "gate")


def texts(llm: LLM, kind: str) -> tuple[str | list[int], str | None]:
    """Returns the prompt of a kind of text, and the text that follows; None if the model writes it."""
    if kind == "editing":
        return EDITS[0].prompt, EDITS[0].edited
    if kind == "repetition":
        lines = [LINE.format(i, PARTS[i % len(PARTS)]) for i in range(1, 60)]
        return "".join(lines[:4]), "".join(lines[4:])
    prompt = FUNCTIONS[0] if kind == "code" else QUESTION
    if kind == "chat" and llm.tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        return apply_template(llm.tokenizer, messages, add_generation_prompt=True, return_dict=False), None
    return prompt, None


def scored(model: Model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Returns the distributions [N, V] of a model before each of ``tokens`` [N]."""
    return text_logits(model, SampledText(tuple(prompt), tuple(tokens), len(tokens))).float().softmax(-1)


def scored_by_head(model: Model, head: LoadedHead[EagleNet], prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Returns a head's distributions [N, V] before each of ``tokens`` [N], in its first draft position."""
    whole = [*prompt, *tokens]
    handle = model.open(whole[:1])
    (scores,) = model.score([handle], [Draft.chain(whole[1:])], head.taps)
    model.close(handle)
    features = head.net.features(torch.cat([scores.taps[layer] for layer in head.taps], dim=-1))
    logits = head.net.to_target(head.net.teacher_forced(whole[1:], features[:-1]))
    return logits.softmax(-1)[-len(tokens) - 1 : -1]


def record(llm: LLM, kind: str, temperature: float, count: int, drafted: Distributions) -> dict[str, Any]:
    """Returns one stream of a kind of text. drafted: the drafter's distributions."""
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=7, ignore_eos=True)
    text, following = texts(llm, kind)
    prompt = text if isinstance(text, list) else llm.tokenizer.encode(text)
    if following is None:
        tokens = list(llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids)
    else:
        tokens = llm.tokenizer.encode(following)[:count]
    stream: dict[str, Any] = {"kind": kind, "temperature": temperature, "prompt": prompt, "tokens": tokens}
    p, q = scored(llm.target, prompt, tokens), drafted(prompt, tokens)
    best = q.max(-1)
    stream["claims"] = [round(float(claim), 2) for claim in best.values]
    stream["right"] = [int(a == b) for a, b in zip(best.indices.tolist(), tokens, strict=True)]
    stream["accepted"] = [round(float(value), 2) for value in torch.minimum(p, q).sum(-1)]
    return stream


def main(
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("tests/control/streams.json"),
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 400,
) -> None:
    """Records the streams."""
    streams: dict[str, list[dict[str, Any]]] = {}
    plain = {"method": "none"}
    for pair in ("bundled", "smollm2"):
        path = zoo.path("target") if pair == "bundled" else real_model_path("smollm2")
        llm = LLM(path, speculative_config=plain, dtype="float32" if pair == "bundled" else "auto", max_model_len=2048)
        if pair == "bundled":
            drafted: Distributions = partial(
                scored, LLM(zoo.path("draft"), speculative_config=plain, dtype="float32").target
            )
        else:
            head = load_eagle(llm.target, llm.tokenizer, zoo.path("smollm2-135m-eagle3"), path)
            drafted = partial(scored_by_head, llm.target, head)
        streams[pair] = [
            record(llm, kind, temperature, tokens, drafted)
            for kind, temperature in product(("code", "editing", "repetition", "chat"), (0.0, 1.0))
        ]
    output.write_text(json.dumps(streams, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    typer.run(main)
