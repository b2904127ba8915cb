"""Walks through JSON schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# The keywords whose values are schemas by name; a schema, or a list of schemas. Values of other keywords are data.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DIRECT = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
)

Path = tuple[str, ...]


def subschemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields a schema and every schema within it, each with its path of keywords, names and indices.

    A schema may be changed once it was yielded. References are not followed.
    """
    pending: list[tuple[Path, Any]] = [((), schema)]
    while pending:
        path, part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        inner: list[tuple[Path, Any]] = []
        for keyword, value in part.items():
            if keyword in _BY_NAME and isinstance(value, dict):
                inner += [((*path, keyword, name), subschema) for name, subschema in value.items()]
            elif keyword in _DIRECT and isinstance(value, list):
                inner += [((*path, keyword, str(index)), subschema) for index, subschema in enumerate(value)]
            elif keyword in _DIRECT:
                inner.append(((*path, keyword), value))
        pending += reversed(inner)
