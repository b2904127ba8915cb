"""Chat templates are checked before they are needed, and their errors name the template or the messages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import ForetokenError, InvalidRequest, ModelLoadError
from foretoken.engine.chat_template import apply_template, check_template, own_template, read_template
from foretoken.models.formats.checkpoint import load_tokenizer

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
def test_templates_of_checkpoints_are_checked(
    content: bytes, error: type[ForetokenError], words: str, tiny_pair: Any, tmp_path: Path
) -> None:
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
