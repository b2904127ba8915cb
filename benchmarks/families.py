"""Which causal model families of transformers are served, by which runtime, and why the others are refused.

    python benchmarks/families.py > families.md

Every family that transformers lists for causal language modelling is built as a tiny random model whose attention
windows are a few tokens long, and wrapped as a loaded checkpoint would be. A family is served if its logits in ragged
batches with draft trees equal its logits alone. Sizes and layers are those of the default configuration. The table is
Markdown; `docs/reference/families.md` has its summary.
"""

from dataclasses import dataclass
from typing import Any

import transformers
from rich.console import Console
from rich.progress import track
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretoken.core.errors import ForetokenError
from foretoken.models.decoder import Decoder
from foretoken.models.hf.model import HFModel
from foretoken.models.hf.probe import one_line
from foretoken.models.hf.tiny_random import boundaries, tiny_of

# What published models have where a configuration's defaults are incomplete or of another kind.
COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
}


@dataclass(frozen=True)
class Family:
    """A row of the table. runtime: empty if the family is refused; reason: why it is."""

    name: str
    kind: str
    runtime: str
    reason: str

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.kind} | {self.runtime or 'refused'} | {self.reason} |"


def main() -> None:
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}\n\n| type | class | runtime | reason |\n|---|---|---|---|")
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    for name, kind in track(names, "families", console=Console(stderr=True)):
        print(family(name, kind), flush=True)


def family(name: str, kind: str) -> Family:
    """Builds a tiny model of the family and loads it."""
    try:
        config = CONFIG_MAPPING[name](**COMPLETED.get(name, {}))
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        if Decoder.supports({**config.to_dict(), "model_type": name}):
            return Family(name, kind, "own", "")
        module = tiny_of(getattr(transformers, kind), config, boundaries(config.get_text_config(), 1 << 30))
    except Exception as error:  # configurations whose defaults are inconsistent, or that need other packages
        return Family(name, kind, "not checked", one_line(error)[:120])
    if module is None:
        return Family(name, kind, "not checked", "no tiny model can be built from the default configuration")
    try:
        HFModel(module)
    except ForetokenError as error:
        return Family(name, kind, "", one_line(error).removeprefix(f"{kind} ").partition("; ")[0])
    return Family(name, kind, "transformers", "")


if __name__ == "__main__":
    main()
