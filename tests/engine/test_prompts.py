"""Prompts that cannot fit are refused before they are tokenized; errors of chat templates name the template."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.core.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from foretoken.engine.prompts import (
    ContextLimit,
    PromptTokenizer,
    apply_template,
    check_template,
    own_template,
    read_template,
)
from foretoken.engine.requests import RequestBuilder
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.params import SamplingParams

CONTEXT = 20


class Counting:
    """A tokenizer that notes what it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer(text, **options)

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)


@pytest.fixture
def counting(tokenizer: Any) -> Counting:
    return Counting(tokenizer)


@pytest.fixture
def builder(counting: Counting) -> RequestBuilder:
    return RequestBuilder(counting, len(counting.get_vocab()), [], seed=0, max_length=CONTEXT)


@pytest.fixture
def longest(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


def test_a_text_beyond_the_longest_tokens_is_refused_untokenized(builder, counting, longest):
    text = "é" * (CONTEXT * longest + 1)
    words = (
        f"has {len(text)} characters; the model's context length is {CONTEXT} tokens, which are {len(text) - 1} char"
    )
    for refused in (
        lambda: builder.tokenize(text),
        lambda: builder.tokenize({"prompt": text}),
        lambda: builder.rendered(text),
        lambda: builder.build("a", SamplingParams(prediction=text)),
    ):
        counting.characters = 0
        with pytest.raises(ContextLengthExceeded, match=words):
            refused()
        assert counting.characters <= 1


def test_every_text_that_fits_is_taken(builder: RequestBuilder, tokenizer: Any, longest: int) -> None:
    """The longest token as often as the context holds it is just as long as a text may be."""
    token = max(tokenizer.get_vocab().values(), key=lambda id: len(tokenizer.decode([id])))
    text = tokenizer.decode([token] * CONTEXT)
    assert len(text) <= CONTEXT * longest
    assert builder.tokenize(text).tokens == tokenizer(text)["input_ids"]


def test_ids_beyond_the_context_are_refused_unchecked(builder: RequestBuilder) -> None:
    for refused in (
        lambda: builder.tokenize([-1] * (CONTEXT + 1)),
        lambda: builder.build("a", SamplingParams(prediction=[-1] * (CONTEXT + 1))),
        lambda: builder.build("a", SamplingParams(prediction="é" * (CONTEXT + 1))),
    ):
        with pytest.raises(ContextLengthExceeded, match=f"{CONTEXT + 1} tokens|{2 * CONTEXT + 2} tokens"):
            refused()


@pytest.mark.parametrize("max_model_len", [16, 40])
def test_prompts_that_fill_the_context_and_that_exceed_it_raise_the_same_error(tiny_pair, max_model_len):
    llm = LLM(tiny_pair.target, dtype="float32", max_model_len=max_model_len)
    letters = ((id, llm.tokenizer.decode([id])) for id in range(400))
    token = next(id for id, text in letters if len(text) == 1 and llm.tokenizer.encode(text * 3) == [id] * 3)
    for count in (max_model_len, max_model_len + 1, 3 * max_model_len):
        for prompt in ([token] * count, llm.tokenizer.decode([token]) * count):
            with pytest.raises(ContextLengthExceeded) as caught:
                llm.generate({"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt)
            assert str(caught.value) == (
                f"the prompt has {count} tokens; the model's context length is {max_model_len} tokens, prompt and "
                "output together; shorten it or raise max_model_len"
            )
    (output,) = llm.generate({"prompt_token_ids": [token] * (max_model_len - 1)})
    assert len(output.outputs[0].token_ids) == 1


def test_an_encoder_decoder_limits_both_texts(counting: Counting, longest: int) -> None:
    vocabulary = len(counting.get_vocab())
    limits = ContextLimit(counting, CONTEXT), ContextLimit(counting, 2 * CONTEXT, "the encoder reads at most")
    reader = PromptTokenizer(counting, vocabulary, (0,), *limits)
    for name, words in (("encoder_prompt", "the encoder reads at most 40"), ("decoder_prompt", "context length is 20")):
        prompts = {"encoder_prompt": "a", "decoder_prompt": "b", name: "c" * (2 * CONTEXT * longest + 1)}
        with pytest.raises(ContextLengthExceeded, match=words):
            reader.tokenize(prompts)
    assert len(reader.tokenize({"encoder_prompt": [1] * 2 * CONTEXT}).source) == 2 * CONTEXT


def test_without_a_limit_nothing_is_too_long(tokenizer: Any) -> None:
    assert len(PromptTokenizer(tokenizer, len(tokenizer)).tokenize("a " * 5000).tokens) > 4000


@pytest.mark.parametrize("text", ["a\ud800", "\udcff"])
def test_half_of_a_surrogate_pair_is_refused(builder: RequestBuilder, text: str) -> None:
    """Bytes that are not UTF-8 on a command line; tokenizers raise a TypeError that says nothing."""
    for refused in (
        lambda: builder.tokenize(text),
        lambda: builder.build("a", SamplingParams(prediction=text)),
        lambda: builder.build("a", SamplingParams(bad_words=[text])),
    ):
        with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
            refused()


BROKEN = {
    "a loop without an end": "{% for m in messages %}\n{{ m.content }}",
    "an unfinished expression": "{{ messages[0].",
    "an unknown tag": "{% generate %}x{% endgenerate %}",
    "an unknown filter": "{% for m in messages %}{{ m.content | capitalise }}{% endfor %}",
    "an unknown test": "{{ messages is sorted }}",
}
VALID = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}",
    "{{ strftime_now('%Y') }}{% set n = namespace(x=1) %}",
    "{{ raise_exception('never') }}",
)


@pytest.mark.parametrize("template", BROKEN.values(), ids=BROKEN)
def test_templates_that_are_not_jinja_are_refused(template: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    with pytest.raises(InvalidRequest, match=rf"the chat template {file} is not valid Jinja \(line \d: "):
        read_template(file)
    with pytest.raises(InvalidRequest, match="chat_template is not valid Jinja"):
        check_template({"default": VALID[0], "tool_use": template}, "chat_template")


@pytest.mark.parametrize("template", VALID)
def test_templates_with_what_transformers_adds_are_valid(template: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    assert read_template(file) == template


@pytest.mark.parametrize("content", [b"\xff\xfe{{ messages }}", None])
def test_files_that_are_not_utf_8_are_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"cannot read the chat template .*expected a Jinja file in UTF-8"):
        read_template(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content, error, words",
    [
        (
            BROKEN["a loop without an end"].encode(),
            InvalidRequest,
            r"of target is not valid Jinja .*; use generate\(\)",
        ),
        (b"\xff{{ messages }}", ModelLoadError, "cannot be loaded with transformers"),
        (b"", InvalidRequest, r"target has no chat template; use generate\(\)"),
    ],
)
def test_templates_of_checkpoints_are_checked(content, error, words, tiny_pair, tmp_path):
    folder = shutil.copytree(tiny_pair.target, tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(error, match=words):
        own_template(load_tokenizer(folder), "target", "use generate()")


@pytest.mark.slow
@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('only one user') }}", "messages do not fit the chat template: only one user"),
        ("{{ messages[9].content }}", "messages do not fit the chat template: .*has no element 9"),
        ("{{ messages[0].content + 1 }}", "messages do not fit the chat template: .*concatenate str"),
        # An unknown filter in a branch is found only when the branch is taken.
        ("{% if messages %}{{ messages | capitalise }}{% endif %}", "the chat template is broken: .*capitalise"),
    ],
)
def test_errors_of_applied_templates_are_invalid_requests(template: str, words: str, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match=words):
        apply_template(tokenizer, messages, chat_template=template, tokenize=False)
