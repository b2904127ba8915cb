"""Time of one decode step of each dense family on our runtime and through transformers.

    python benchmarks/family_speed.py [family ...]

Every family of the table is built with random weights at about 0.3 billion parameters, in bfloat16, saved, and loaded
twice: by the compiled runtime, as ``LLM`` loads it (weights in 12 bits where that is faster), and by the wrapper around
transformers' module. Steps of one row after 64 tokens alternate between the two; medians are printed as a Markdown
table. Families that the wrapper refuses have no time for it.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretoken.core.draft import Draft
from foretoken.core.errors import ForetokenError
from foretoken.models.base import Model
from foretoken.models.families.table import FAMILIES
from foretoken.models.loading import load_model

PROMPT, STEPS, WARM_UP = 64, 15, 3
SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GATED, UNGATED = (
    {"intermediate_size": 4096, "num_hidden_layers": 15},
    {"intermediate_size": 4096, "num_hidden_layers": 20},
)


def config_of(family: str) -> Any:
    """Returns a configuration of about 0.3 billion parameters."""
    kind, row = CONFIG_MAPPING[family], FAMILIES[family]
    known = vars(kind())
    sizes = SIZES | (GATED if row.gated else UNGATED)
    own: Mapping[str, str] = {name: alias for name, alias in row.aliases.items() if alias in known}
    chosen = {own.get(name, name): value for name, value in sizes.items() if own.get(name, name) in known}
    if family == "gpt_neo":
        chosen["attention_types"] = [[["global", "local"], chosen["num_layers"] // 2]]
    return kind(**chosen)


class Stepper:
    """Decodes one sequence, a token at a time."""

    def __init__(self, model: Model) -> None:
        self._model, self._handle, self.times = model, model.open(list(range(3, 3 + PROMPT))), list[float]()

    def step(self) -> None:
        """Computes the logits after one more token."""
        start = perf_counter()
        self._model.score([self._handle], [Draft.empty()])
        self.times.append(perf_counter() - start)
        self._model.commit([self._handle], [[7]])

    @property
    def milliseconds(self) -> float:
        """Median time of a step."""
        return 1e3 * median(self.times[WARM_UP:])


def row(family: str) -> str:
    """Returns a family's row of the table."""
    module = AutoModelForCausalLM.from_config(config_of(family)).bfloat16()
    size = sum(parameter.numel() for parameter in module.parameters())
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        del module
        gc.collect()
        steppers = [Stepper(load_model(folder, "bfloat16", "cpu", "native", weight_format="auto"))]
        with suppress(ForetokenError):  # refused
            steppers.append(Stepper(load_model(folder, "bfloat16", "cpu", "hf")))
        for _ in range(WARM_UP + STEPS):
            for stepper in steppers:
                stepper.step()
    times = [stepper.milliseconds for stepper in steppers]
    wrapped = f"{times[1]:.1f} | {times[1] / times[0]:.1f}" if len(times) > 1 else "refused |"
    return f"| `{family}` | {size / 1e9:.2f} | {times[0]:.1f} | {wrapped} |"


def main() -> None:
    transformers.logging.set_verbosity_error()
    families = sys.argv[1:] or sorted(name for name in FAMILIES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    print("| family | parameters, billions | our runtime, ms | transformers, ms | ratio |\n|---|---|---|---|---|")
    for family in families:
        print(row(family), flush=True)


if __name__ == "__main__":
    main()
