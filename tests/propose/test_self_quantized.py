"""The target's own weights at fewer bits draft from the target's KV cache."""

from pathlib import Path
from typing import Any

import pytest
from tests.models.test_native import needs_kernels
from tests.models.tiny import ARCHITECTURES, Tiny

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.devices import Memory
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.formats import memory
from foretoken.models.runners.native.build import Kind, ScaleKind, grouped_kind, kind_bits
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.propose.early_exit import SelfQuantizedConfig, SharedCacheDraft

pytestmark = needs_kernels

COPY: dict[str, Any] = {"method": "self_quantized", "num_speculative_tokens": 4}


def opened(config: dict[str, Any], **options: Any) -> LLM:
    return LLM(zoo.path("target"), speculative_config=config, dtype="bfloat16", max_model_len=256, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"weight_format": "packed"}, {"quantization": "int8"}], ids=str)
def test_the_copy_shares_embedding_and_cache_and_is_mostly_right(options: dict[str, Any]) -> None:
    llm, plain = opened(COPY, **options), opened({"method": "none"}, **options)
    proposer = llm._proposer
    assert isinstance(proposer, SharedCacheDraft)
    copy, target = proposer.model.runner, llm.target.runner
    assert isinstance(copy, NativeRunner) and isinstance(target, NativeRunner)
    assert copy._spec.embedding == target._spec.embedding and copy._spec.table.data == target._spec.table.data
    assert min(map(kind_bits, copy.kinds)) == 4 < min(map(kind_bits, target.kinds))
    assert llm.engine.proposer.kv_bytes_per_token == 0 and copy.nbytes() == target.nbytes()
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(FUNCTIONS[:3], params)
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in plain.generate(FUNCTIONS[:3], params)
    ]
    assert min(output.stats.mean_acceptance_length for output in outputs) > 3
    llm.target.check()


@pytest.mark.slow
def test_a_sequence_may_fill_the_context_window() -> None:
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    texts = [opened(config).generate("x = [", params)[0].outputs[0].token_ids for config in (COPY, {"method": "none"})]
    assert texts[0] == texts[1] and len(texts[0]) > 200


def test_recurrent_targets_have_a_copy_with_states_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    tiny = ARCHITECTURES["qwen3.5"]
    Tiny(tiny.family, {**tiny.config, "vocab_size": 400}).save(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path, speculative_config=COPY, dtype="float32", max_model_len=128)
    assert type(llm._proposer).__name__ == "DraftModel"
    assert llm._proposer.state_bytes == llm.target.state_bytes


def test_bits_of_kinds() -> None:
    assert [kind_bits(kind) for kind in Kind] == [32, 16, 8, 12, 4]
    assert all(kind_bits(grouped_kind(bits, True, ScaleKind.TWO_LEVELS)) == bits for bits in (4, 6, 8))


@pytest.mark.parametrize(
    "config, options, message",
    [
        ({"model": "anything"}, {}, "leave 'model' out"),
        ({}, {"quantization": "int4"}, "more than the 4 bits of 'int4'"),
        ({"quantization": "int8"}, {"quantization": "int8"}, "more than the 8 bits of 'int8'"),
        ({"quantization": "int3"}, {}, "'int3' is not known"),
        ({"tree": "chain"}, {"backend": "hf"}, "needs a target from a file on the compiled runtime"),
    ],
)
def test_targets_that_gain_nothing_are_refused(config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        opened({"method": "self_quantized", **config}, **options)
    with pytest.raises(InvalidRequest, match="leave it out for 'int4'"):
        SelfQuantizedConfig(quantization=None)  # type: ignore[arg-type]


def test_a_copy_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([2**40, 2**40, 2**20])  # the sum and the target fit, the copy does not
    monkeypatch.setattr(memory, "machine_memory", lambda: Memory(next(free, 2**20), 2**40))
    with pytest.raises(ModelLoadError, match="for its weights"):
        opened(COPY)
