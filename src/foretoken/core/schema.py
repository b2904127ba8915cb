"""Schemas of JSON files: the type and range of each field, with one-line errors; and walks through JSON schemas."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from reprlib import Repr
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from foretoken.core.errors import ModelLoadError
from foretoken.core.files import AGAIN, read_json

# The keywords whose values are schemas by name; a schema, or a list of schemas. Values of other keywords are data.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DIRECT = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
)

KeyPath = tuple[str, ...]


def subschemas(schema: Any) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yields a schema and every schema within it, each with its path of keywords, names and indices.

    A schema may be changed once it was yielded. References are not followed.
    """
    pending: list[tuple[KeyPath, Any]] = [((), schema)]
    while pending:
        path, part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        inner: list[tuple[KeyPath, Any]] = []
        for keyword, value in part.items():
            if keyword in _BY_NAME and isinstance(value, dict):
                inner += [((*path, keyword, name), subschema) for name, subschema in value.items()]
            elif keyword in _DIRECT and isinstance(value, list):
                inner += [((*path, keyword, str(index)), subschema) for index, subschema in enumerate(value)]
            elif keyword in _DIRECT:
                inner.append(((*path, keyword), value))
        pending += reversed(inner)


MAX_PROBLEMS = 5  # listed in one error
MAX_INT = 2**31 - 1  # sizes and token ids are int32 in the kernels
MAX_ATTENTION_HEADS = 65_536

Size = Annotated[int, Field(ge=1, le=MAX_INT)]
"""Size of a dimension of a tensor, or a number of positions."""
Layers = Annotated[int, Field(ge=1, le=10_000)]
"""A number of layers. The bound keeps lists with one entry per layer small before the tensors are counted."""
Heads = Annotated[int, Field(ge=1, le=MAX_ATTENTION_HEADS)]
"""A number of attention heads, or the width of one."""
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Epsilon = Annotated[float, Field(ge=0, le=1)]

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 2, 4, 4, 60, 60


def shortened(value: object) -> str:
    """Returns ``value`` for an error message: one line, shortened where it is long or deeply nested."""
    return _SHORT.repr(value).replace("\n", " ")


def _listed(value: Any) -> Any:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


TokenIds = Annotated[list[TokenId], BeforeValidator(_listed)]
"""One id, several, or null for none."""


class Schema(BaseModel):
    """Base of all schemas. Numbers must be finite and not strings. Unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


AnySchema = TypeVar("AnySchema", bound=Schema)


def parse(schema: type[AnySchema], value: Any, what: str, names: Mapping[str, str] = MappingProxyType({})) -> AnySchema:
    """Returns ``value`` as the schema's type.

    Args:
        schema: The expected type.
        value: Content of a JSON file.
        what: Name of the file, for the error message.
        names: Names of fields in the file, if they differ from the schema's.

    Raises:
        ModelLoadError: Fields are missing or wrong. The message lists them in one line.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(detail, names) for detail in error.errors(include_url=False)))
    shown = "; ".join(problems[:MAX_PROBLEMS])
    more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    raise ModelLoadError(f"{what} {shown}{more}")


def _problem(detail: Any, names: Mapping[str, str]) -> str:
    field = ".".join(names.get(str(part), str(part)) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"lacks {field!r}"
    if detail["type"] == "value_error":  # raised by one of our validators, whose message is complete
        return str(detail["ctx"]["error"])
    expected = detail["msg"].removeprefix("Input ")
    return f"has {field or 'a value'} = {shortened(detail['input'])}, which {expected}"


def read_object(file: Path, schema: type[Schema] = Schema, hint: str = AGAIN) -> dict[str, Any]:
    """Returns the JSON object in a file, including keys that the schema does not list.

    Args:
        schema: Schema that the object must satisfy.
        hint: What to do about a file that cannot be read, for the error message.

    Raises:
        ModelLoadError: The file cannot be read, holds no object, or does not satisfy the schema.
    """
    value = read_json(file, hint)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds a {type(value).__name__}; expected an object; {hint}")
    parse(schema, value, str(file))
    return value
