"""OpenAI's rule for ``strict: true``: every object of the JSON schema names all of its properties."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from foretoken.core.json_schema import subschemas

_RESTRICTIONS = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}  # a schema without any of them or a type is open


def check_strict(strict: bool | None, schema: Any, owner: str, field: str) -> None:
    """Raises a validation error if a strict schema has an object that is open to other properties.

    Args:
        strict: Whether the client asked for strictness.
        schema: The schema; None has no objects.
        owner: The thing that has the schema, for the error.
        field: The schema's field of it.
    """
    for path, part in subschemas(schema) if strict and schema is not None else ():
        if _allows_objects(part) and part.get("additionalProperties") is not False:
            context = {"owner": owner, "field": field, "path": ", ".join(map(repr, path))}
            raise PydanticCustomError(
                "strict_schema",
                "Invalid schema for {owner}: In context=({path}), 'additionalProperties' is required to be supplied "
                "and to be false, because strict is true; add it, or leave strict out",
                context,
            )


def _allows_objects(schema: dict[str, Any]) -> bool:
    types = schema.get("type")
    if types is None:
        return "properties" in schema or not _RESTRICTIONS & schema.keys()
    return types == "object" or (isinstance(types, list) and "object" in types)
