"""No finding of AddressSanitizer, UndefinedBehaviorSanitizer or ThreadSanitizer in random passes and drafts.

FORETOKEN_FUZZ_PROMPTS sets how many prompts are drafted for, 60 by default; from 1000 on, by drafts of every weight
format. FORETOKEN_FUZZ_MODELS sets how many random models are run, 3 by default. FORETOKEN_FUZZ_SEED chooses others.
"""

import os
from pathlib import Path

import pytest
from tests.models.tiny import GROUPED, Tiny

from foretoken.core.native import build
from foretoken.models.runners.native.build import Kind, decoder_sources

from .emulated import HERE, SOURCES, compiled
from .gguf_files import K, tiny_checkpoint, write_both
from .sanitizers import level, python, run, toolchain

pytestmark = pytest.mark.slow

PROMPTS = int(os.environ.get("FORETOKEN_FUZZ_PROMPTS", "60"))
MODELS = int(os.environ.get("FORETOKEN_FUZZ_MODELS", "3"))
SEED = int(os.environ.get("FORETOKEN_FUZZ_SEED", "50"))
ALL_FORMATS = PROMPTS >= 1000  # each takes ten seconds to compile

# Kinds of weights and of caches. ThreadSanitizer looks at the order of loops, which the formats share.
SETS = {
    "address": ((Kind.BFLOAT16, Kind.INT8, Kind.PACKED, Kind.GROUPED), (Kind.BFLOAT16, Kind.INT8)),
    "thread": ((Kind.BFLOAT16,), (Kind.BFLOAT16,)),
}


@pytest.mark.parametrize("sanitizer", SETS)
def test_random_passes_have_no_finding_and_the_same_bits(sanitizer: str) -> None:
    """Sequences alone and among others, on one thread and more, in clean memory and in memory with old numbers."""
    tools, own = toolchain(sanitizer), level()
    kinds, caches = SETS[sanitizer]
    libraries = (
        build.linked("pool", [(build.SHARED / "pool.cpp", ())], build.ANY, tools=tools),
        build.linked("cases", [(HERE.parent / "core" / "pool_cases.cpp", ())], build.ANY, tools=tools),
        build.linked("packing", [(SOURCES / "packing.cpp", ())], own, tools=tools),
        build.linked("decoder", decoder_sources(kinds, caches), own, tools=tools),
        build.linked("sampling", [(build.SHARED / "sampling.cpp", ())], own, tools=tools),
    )
    program = compiled(tools, libraries[0].parent, "random_passes.cpp", "-O0")
    printed = run([str(program), str(SEED), str(MODELS), *map(str, libraries)])
    assert printed.count("random passes") == len(kinds) * len(caches)


def test_drafts_with_a_smaller_vocabulary_have_no_finding_and_change_no_text(tmp_path: Path) -> None:
    target = Tiny("Llama", {**GROUPED, "vocab_size": 5000}).save(tmp_path / "target")
    small = Tiny("Llama", {**GROUPED, "vocab_size": 96}).save(tmp_path / "small")
    tied = Tiny("Llama", {**GROUPED, "vocab_size": 96, "tie_word_embeddings": True}).save(tmp_path / "tied")
    drafts = [f"bfloat16={small}", f"packed={tied}", f"int8={tied}"]
    if ALL_FORMATS:
        drafts += [f"float32={small}", f"int8={small}", f"packed={small}", f"int4={small}", f"int4={tied}"]
        for kind in (K.Q8_0, K.Q4_1, K.Q4_K, K.Q6_K):  # the embedding included
            (folder := tmp_path / kind.name).mkdir()
            drafts.append(
                f"gguf={write_both(tiny_checkpoint('llama', tie_word_embeddings=True), 'llama', folder, kind)[0]}"
            )
    printed = python("tests.models.mismatched_drafts", str(target), str(PROMPTS), str(SEED), *drafts)
    prompts, tokens = map(int, printed.split()[:2])
    assert prompts == PROMPTS and tokens > PROMPTS
