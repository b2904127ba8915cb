"""Chat templates in Jinja: read from files, checked before they are needed, and applied to conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.core.files import read_text


def read_template(file: Path | None) -> str | None:
    """Returns the template in ``file``. Raises InvalidRequest if it is not a text file, or not valid Jinja."""
    if file is None:
        return None
    template = read_text("the chat template", file, "a Jinja file")
    check_template(template, f"the chat template {file}")
    return template


def check_template(template: str | Mapping[str, str] | None, name: str) -> None:
    """Raises InvalidRequest if a template is not valid Jinja.

    Args:
        template: a template, or several by their names.
        name: its name in the message.
    """
    from jinja2.exceptions import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template  # has the tags that transformers adds

    for text in template.values() if isinstance(template, Mapping) else [template]:
        if not isinstance(text, str):
            continue
        try:
            _compile_jinja_template(text)
        except TemplateSyntaxError as error:
            raise InvalidRequest(f"{name} is not valid Jinja (line {error.lineno}: {error.message})") from error


def own_template(tokenizer: Any, model: str, advice: str) -> Any:
    """Returns the chat template of a tokenizer, or several by their names.

    Args:
        model: the model's name in the message.
        advice: alternatives to this template, for the message.

    Raises:
        InvalidRequest: there is none, or it is not valid Jinja.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise InvalidRequest(f"{model} has no chat template; {advice}", param="messages")
    try:
        check_template(template, f"the chat template of {model}")
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; {advice}", param="messages") from error
    return template


def apply_template(tokenizer: Any, messages: Iterable[Any], **options: Any) -> Any:
    """Returns the result of the tokenizer's ``apply_chat_template``.

    Raises:
        InvalidRequest: the template refuses the messages, or fails for them.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except ForetokenError:
        raise
    except Exception as error:  # templates raise exceptions of any class, some on purpose
        from jinja2.exceptions import TemplateRuntimeError, UndefinedError

        broken = isinstance(error, TemplateRuntimeError) and not isinstance(error, UndefinedError)
        problem = "the chat template is broken" if broken else "messages do not fit the chat template"
        raise InvalidRequest(f"{problem}: {error}", param="messages") from error
