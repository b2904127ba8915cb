"""``generate(custom_generate=...)`` against plain ``generate`` on the same modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import foretoken
from foretoken.core.errors import InvalidRequest

pytestmark = pytest.mark.slow

VOCAB = 60
PROMPT = torch.tensor([[5, 9, 13, 9, 5, 20]])
PADDED = {
    "input_ids": torch.tensor([[0, 0, 7, 8, 9], [4, 5, 6, 7, 8], [0, 3, 9, 9, 3]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
}


def llama(layers: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target() -> Any:
    return llama()


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    """The target a little disturbed: it agrees often, not always."""
    near = copy.deepcopy(target)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.mul_(1 + torch.randn_like(parameter) * 0.1)
    return near


class Passes:
    """Counts a module's forward passes."""

    def __init__(self, module: Any) -> None:
        self.count = 0
        self._hook = module.register_forward_hook(self._seen)

    def _seen(self, *_: Any) -> None:
        self.count += 1

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()


def both(model: Any, assistant: Any, **kwargs: Any) -> tuple[Any, Any]:
    plain = model.generate(**kwargs)
    ours = model.generate(**kwargs, custom_generate=foretoken.custom_generate, assistant_model=assistant)
    return plain, ours


def test_greedy_is_the_same_text_in_fewer_passes(target: Any, draft: Any) -> None:
    target.generate(PROMPT, max_new_tokens=1, custom_generate=foretoken.custom_generate, assistant_model=draft)
    plain = target.generate(PROMPT, max_new_tokens=40, do_sample=False)
    with Passes(target) as checked, Passes(draft) as drafted:
        ours = target.generate(
            PROMPT, max_new_tokens=40, do_sample=False, custom_generate=foretoken.custom_generate, assistant_model=draft
        )
    assert torch.equal(plain, ours)
    assert ours.dtype == torch.int64
    assert drafted.count > 0 and checked.count < 30


def test_itself_as_assistant_needs_one_pass_a_block(target: Any) -> None:
    target.generate(PROMPT, max_new_tokens=1, custom_generate=foretoken.custom_generate, assistant_model=target)
    other = copy.deepcopy(target)
    kwargs = {
        "max_new_tokens": 40,
        "do_sample": False,
        "eos_token_id": None,
        "custom_generate": foretoken.custom_generate,
    }
    target.generate(PROMPT, assistant_model=other, **{**kwargs, "max_new_tokens": 1})
    with Passes(target) as checked:
        target.generate(PROMPT, assistant_model=other, num_assistant_tokens=7, **kwargs)
    assert checked.count == 5


def test_gpt2_and_an_assistant_of_another_architecture(target: Any) -> None:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2, eos_token_id=2
    )
    plain, ours = both(
        GPT2LMHeadModel(config).eval(), target, inputs=PROMPT, max_new_tokens=30, do_sample=False, pad_token_id=0
    )
    assert torch.equal(plain, ours)


def test_left_padded_batch_with_rows_that_end_early(target: Any, draft: Any) -> None:
    plain = target.generate(**PADDED, max_new_tokens=30, do_sample=False, eos_token_id=None)
    eos = plain[0, 12].item()  # a token that some rows reach and others do not
    plain, ours = both(target, draft, **PADDED, max_new_tokens=30, do_sample=False, eos_token_id=[2, eos])
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    "parameters",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "bad_words_ids": [[7], [8, 9]]},
        {"sequence_bias": [[[11], 4.0], [[5, 9], 6.0]]},
        {"suppress_tokens": [3, 4, 5], "forced_eos_token_id": 2},
    ],
    ids=lambda p: next(iter(p)),
)
def test_processors_see_each_nodes_own_history(target: Any, draft: Any, parameters: dict[str, Any]) -> None:
    plain, ours = both(target, draft, **PADDED, max_new_tokens=25, do_sample=False, **parameters)
    assert torch.equal(plain, ours)


def test_processors_that_know_the_row_number(target: Any, draft: Any) -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [t for t in range(3, VOCAB) if t % 3 == row and t != ids[-1]]

    plain, ours = both(target, draft, **PADDED, max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(plain, ours)


def test_custom_processor(target: Any, draft: Any) -> None:
    class NotTwice(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.scatter(1, input_ids[:, -2:], -torch.inf)

    processors = LogitsProcessorList([NotTwice()])
    plain, ours = both(target, draft, **PADDED, max_new_tokens=20, do_sample=False, logits_processor=processors)
    assert torch.equal(plain, ours)


def test_stopping_criteria_end_inside_a_block(target: Any, draft: Any) -> None:
    free = target.generate(PROMPT, max_new_tokens=30, do_sample=False)
    for wanted in free[0, 8:16].tolist():

        class Seen(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
                return (input_ids[:, PROMPT.shape[1] :] == wanted).any(-1)  # noqa: B023

        criteria = StoppingCriteriaList([Seen()])
        plain, ours = both(target, draft, inputs=PROMPT, max_new_tokens=30, do_sample=False, stopping_criteria=criteria)
        assert torch.equal(plain, ours)
        assert plain[0, -1] == wanted


def test_dict_output_with_scores_and_logits(target: Any, draft: Any) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    plain, ours = both(target, draft, inputs=PROMPT, max_new_tokens=15, do_sample=False, **asked)
    assert torch.equal(plain.sequences, ours.sequences)
    assert len(ours.scores) == len(ours.logits) == len(plain.scores)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(plain.scores), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), atol=1e-4, rtol=0)


def test_streamer_gets_what_plain_generate_gives(target: Any, draft: Any) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.pieces: list[list[int]] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            self.pieces.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended += 1

    recorders = Recorder(), Recorder()
    target.generate(PROMPT, max_new_tokens=12, do_sample=False, streamer=recorders[0])
    target.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=False,
        streamer=recorders[1],
        custom_generate=foretoken.custom_generate,
        assistant_model=draft,
    )
    assert recorders[0].pieces == recorders[1].pieces
    assert recorders[1].ended == 1


def test_prompt_lookup_and_plain_decoding(target: Any) -> None:
    plain = target.generate(PROMPT, max_new_tokens=30, do_sample=False)
    for extra in ({"prompt_lookup_num_tokens": 5}, {}):
        ours = target.generate(
            PROMPT, max_new_tokens=30, do_sample=False, custom_generate=foretoken.custom_generate, **extra
        )
        assert torch.equal(plain, ours)


def test_a_module_left_in_training_mode_stays_there(target: Any, draft: Any) -> None:
    trained = copy.deepcopy(target).train()
    ours = trained.generate(PROMPT, max_new_tokens=10, custom_generate=foretoken.custom_generate, assistant_model=draft)
    assert torch.equal(ours, target.generate(PROMPT, max_new_tokens=10, do_sample=False))
    assert trained.training


def histogram(samples: Sequence[Tensor], width: int) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for sample in samples:
        key = tuple(sample[0, -width:].tolist())
        counts[key] = counts.get(key, 0) + 1
    return counts


def test_sampled_law_is_the_models_own(target: Any, draft: Any) -> None:
    """Pairs of tokens after one prompt, 800 draws, against the law computed from the logits (chi-square)."""
    torch.manual_seed(11)
    kwargs = {"do_sample": True, "temperature": 0.7, "top_k": 4, "max_new_tokens": 2, "eos_token_id": None}
    runs = [
        target.generate(
            PROMPT.repeat(50, 1), **kwargs, custom_generate=foretoken.custom_generate, assistant_model=draft
        )
        for _ in range(16)
    ]
    counts = histogram([row[None] for run in runs for row in run], 2)

    def law(ids: list[int]) -> Tensor:
        logits = target(torch.tensor([ids])).logits[0, -1].detach() / 0.7
        return logits.masked_fill(logits < logits.topk(4).values[-1], -torch.inf).softmax(-1)

    prompt = PROMPT[0].tolist()
    first = law(prompt)
    expected = {
        (a, b): float(first[a] * second[b])
        for a in first.nonzero().flatten().tolist()
        for second in [law([*prompt, a])]
        for b in second.nonzero().flatten().tolist()
    }
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    statistic = sum((counts.get(k, 0) - total * p) ** 2 / (total * p) for k, p in expected.items())
    assert statistic < 37.7  # chi-square with 15 degrees of freedom, p = 0.001


def test_the_models_length_ends_generation_with_a_warning(draft: Any) -> None:
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    short = GPT2LMHeadModel(config).eval()
    with pytest.warns(UserWarning, match="16 positions"):
        ours = short.generate(
            PROMPT,
            max_new_tokens=20,
            eos_token_id=None,
            pad_token_id=0,
            custom_generate=foretoken.custom_generate,
            assistant_model=draft,
        )
    assert ours.shape == (1, 16)


def test_manual_seed_repeats_a_run(target: Any, draft: Any) -> None:
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        kwargs = {"do_sample": True, "max_new_tokens": 12, "custom_generate": foretoken.custom_generate}
        texts.append(target.generate(PROMPT, assistant_model=draft, **kwargs))
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
    ],
)
def test_unsupported_options_are_refused_by_name(target: Any, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        target.generate(PROMPT, max_new_tokens=4, custom_generate=foretoken.custom_generate, **extra)


def test_right_padding_and_foreign_vocabularies_are_refused(target: Any) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    with pytest.raises(InvalidRequest, match="left"):
        target.generate(PROMPT, attention_mask=mask, max_new_tokens=4, custom_generate=foretoken.custom_generate)
    config = LlamaConfig(**{**target.config.to_dict(), "vocab_size": 90})
    with pytest.raises(InvalidRequest, match="vocabulary"):
        target.generate(
            PROMPT,
            max_new_tokens=4,
            custom_generate=foretoken.custom_generate,
            assistant_model=LlamaForCausalLM(config).eval(),
        )


def longrope(original: int) -> Any:
    torch.manual_seed(5)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "original_max_position_embeddings": original,
    }
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.15,
        pad_token_id=0,
        rope_parameters=rope,
        original_max_position_embeddings=original,
    )
    return LlamaForCausalLM(config).eval()


def test_longrope_takes_the_factors_of_the_calls_maximum_length(draft: Any) -> None:
    short = longrope(original=64)
    plain, ours = both(short, draft, inputs=PROMPT, max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert torch.equal(ours, plain)
    always_long = longrope(original=4)  # the prompt is longer
    plain = always_long.generate(PROMPT, max_new_tokens=40, do_sample=False, eos_token_id=None)
    crossing = longrope(original=20)
    crossing.model.rotary_emb.attention_scaling = always_long.model.rotary_emb.attention_scaling
    ours = crossing.generate(
        PROMPT,
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        custom_generate=foretoken.custom_generate,
        assistant_model=draft,
    )
    assert torch.equal(ours, plain)
