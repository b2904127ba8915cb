"""Values of function arguments and tags, in text that arrives in pieces."""

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any


def split_at(text: str, tags: tuple[str, ...]) -> tuple[str, str, str]:
    """Returns the text before the first of ``tags``, the tag (the longest of those there), and the text behind it.

    Without a tag in ``text`` it is empty, and the third is the longest end of ``text`` that begins a tag.
    """
    places = [(place, -len(tag), tag) for tag in tags if (place := text.find(tag)) >= 0]
    if places:
        place, _, tag = min(places)
        return text[:place], tag, text[place + len(tag) :]
    longest = max(map(len, tags), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(tag.startswith(end) for tag in tags):
            return text[:-length], "", end
    return text, "", ""


def dumps(value: Any) -> str:
    """Returns a value as JSON, in the form in which models write arguments."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or is_unicode(text) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """Returns whether ``text`` can be encoded: JSON may escape half of a surrogate pair, which no answer can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def object_of(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments as an object; an empty one if they are no JSON object, for instance because of a cut.

    One bad call in its history must not end a conversation: vLLM replaces such arguments by an empty object, too.
    """
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # 1e999 is read as infinity
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def schema_types(schema: Any) -> set[str]:
    """Returns the JSON types that a schema names; empty where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {str(kind) for kind in named} if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            types = types.union(*map(schema_types, options))
    if not types and isinstance(values := schema.get("enum"), list):
        types = {"string" if isinstance(value, str) else "number" for value in values}
    return types


def typed(text: str, schema: Any) -> Any:
    """Returns the value that ``text`` means where ``schema`` is expected.

    A string stays as it is wherever the schema allows strings or says nothing. Otherwise the text is read as JSON, or
    as a Python literal, and stays a string where it is neither.
    """
    types = schema_types(schema)
    null = text.strip().lower() in ("null", "none")
    if null and ("null" in types or (types and "string" not in types)):
        return None
    if not types or "string" in types:
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if value is ... or isinstance(value, (set, bytes, complex)):
            break
        return _as_json(value, types)
    return text.strip().lower() == "true" if types == {"boolean"} else text


def _as_json(value: Any, types: set[str]) -> Any:
    as_integer = isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types
    return int(value) if as_integer else list(value) if isinstance(value, tuple) else value


def up_to(text: str, tag: str, take: Callable[[str], Any]) -> Generator[None, str, str]:
    """Passes ``text``, and the text that is sent, to ``take`` until ``tag`` comes. Returns the text behind the tag."""
    while True:
        before, found, text = split_at(text, (tag,))
        take(before)
        if found:
            return text
        text += yield


def bracketed(
    text: str, take: Callable[[str], Any], quotes: str = '"', opening: str = "{[", closing: str = "}]"
) -> Generator[None, str, str]:
    """Passes a value in brackets to ``take``, from ``text`` and the text that is sent. Returns the text behind it.

    Raises ValueError if ``text`` does not begin with an opening bracket. Every character is read once.

    quotes: Characters that delimit strings, within which brackets do not count.
    """
    if text[0] not in opening:
        raise ValueError("no value in brackets")
    special = re.compile("[" + re.escape("\\" + quotes + opening + closing) + "]")
    depth, quote, place = 0, "", 0
    while True:
        while (match := special.search(text, place)) is not None:
            place, character = match.end(), match.group()
            if quote:
                if character == "\\":
                    place += 1  # behind the end if the escaped character is still to come
                elif character == quote:
                    quote = ""
            elif character in quotes:
                quote = character
            elif character in opening:
                depth += 1
            elif character in closing:
                depth -= 1
                if not depth:
                    take(text[:place])
                    return text[place:]
        take(text)
        place = max(0, place - len(text))
        text = yield
