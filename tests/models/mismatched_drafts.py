"""Random prompts on kernels with AddressSanitizer, drafted for by models that read fewer tokens; see ``sanitizers``.

Arguments: the target's folder, the number of prompts, a seed, and drafts: a name of ``FORMATS``, "=", and a folder or a
GGUF file. Texts must be those of plain decoding.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.models.loading import load_model
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig

from .sanitizers import load_sanitized

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "bfloat16": {},
    "packed": {"weight_format": "packed"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "gguf": {},
}
BATCH, LENGTH = 10, 6


def prompts(generator: random.Random, target: Model, draft: Model) -> list[list[int]]:
    """Returns prompts of which a third has tokens of the draft alone, a third one other token, and a third any."""
    made = []
    for number in range(BATCH):
        width = target.vocab_size if number % 3 == 2 else draft.vocab_size
        made.append([generator.randrange(width) for _ in range(generator.randint(1, 90))])
        if number % 3 == 1:
            made[-1][generator.randrange(len(made[-1]))] = generator.randrange(draft.vocab_size, target.vocab_size)
    return made


def completed(
    target: Model, proposer: Proposer, texts: Sequence[list[int]], temperature: float
) -> tuple[list[list[int]], int]:
    """Returns the texts with ``LENGTH`` more tokens, and how many tokens were drafted."""
    engine = Engine(target, proposer, Fixed(0 if type(proposer) is Proposer else 4))
    contexts = [
        Context(number, list(text), len(text), SamplingLaw(temperature=temperature), Streams(number))
        for number, text in enumerate(texts)
    ]
    drafted = sum(len(step.draft) for step in engine.run((context, Length(LENGTH)) for context in contexts))
    return [context.tokens for context in contexts], drafted


def main(folder: str, total: str, seed: str, *drafts: str) -> None:
    load_sanitized()
    torch.set_num_threads(2)
    generator, drafted = random.Random(int(seed)), 0
    target = load_model(folder, "bfloat16", "cpu", "native")
    models = [
        load_model(path, device="cpu", backend="native", **{"dtype": "bfloat16"} | FORMATS[name])
        for name, path in (draft.split("=", 1) for draft in drafts)
    ]
    for number in range(int(total) // BATCH):
        draft = models[number % len(models)]
        shape, temperature = generator.choice(["chain", "ranked"]), generator.choice([0.0, 0.0, 0.8])
        proposer = DraftModel(draft, DraftModelConfig(tree=shape), target.vocab_size)  # type: ignore[arg-type]
        texts = prompts(generator, target, draft)
        got, count = completed(target, proposer, texts, temperature)
        assert temperature or got == completed(target, Proposer(), texts, 0.0)[0], f"texts of batch {number}"
        draft.check()
        drafted += count
    target.check()
    print(int(total), drafted, "prompts, and tokens drafted for them")


if __name__ == "__main__":
    main(*sys.argv[1:])
