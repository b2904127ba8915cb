"""Every schema within a schema, and no data."""

from __future__ import annotations

from foretoken.core.json_schema import subschemas


def test_schemas_are_found_and_data_is_not() -> None:
    schema = {
        "properties": {"format": {"type": "string"}, "items": {"items": {"minimum": 1}}},
        "enum": [{"type": "data"}],
        "const": {"properties": {"x": {"type": "data"}}},
        "default": {"items": {"type": "data"}},
        "anyOf": [{"maximum": 2}, True],
        "additionalProperties": {"prefixItems": [{"const": 1}]},
        "$defs": {"a": {"not": {"type": "null"}}},
    }
    assert [path for path, _ in subschemas(schema)] == [
        (),
        ("properties", "format"),
        ("properties", "items"),
        ("properties", "items", "items"),
        ("anyOf", "0"),
        ("additionalProperties",),
        ("additionalProperties", "prefixItems", "0"),
        ("$defs", "a"),
        ("$defs", "a", "not"),
    ]


def test_other_values_have_no_subschemas() -> None:
    assert not list(subschemas(True)) and not list(subschemas([{"type": "object"}]))


def test_schemas_of_any_depth_are_found() -> None:
    schema: dict[str, object] = {}
    for _ in range(3_000):
        schema = {"items": schema}
    assert sum(1 for _ in subschemas(schema)) == 3_001
