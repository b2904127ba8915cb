"""Validates what JSON files hold: a schema states each field's type and range, and one line names what is wrong."""

from __future__ import annotations

from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from foretoken.core.errors import ModelLoadError
from foretoken.core.files import AGAIN, read_json

MAX_PROBLEMS = 5  # named in one error
MAX_INT = 2**31 - 1  # sizes and token ids are int32 in the kernels
MAX_ATTENTION_HEADS = 65_536

Size = Annotated[int, Field(ge=1, le=MAX_INT)]
"""How many numbers a dimension of a tensor has, or how many positions there are."""
Layers = Annotated[int, Field(ge=1, le=10_000)]
"""A number of layers. The bound keeps what is listed by layer small until the tensors themselves are counted."""
Heads = Annotated[int, Field(ge=1, le=MAX_ATTENTION_HEADS)]
"""A number of attention heads, or the width of one."""
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]
Epsilon = Annotated[float, Field(ge=0, le=1)]

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 2, 4, 4, 60, 60


def shortened(value: object) -> str:
    """Returns the value as an error shows it: in one line, however long or deep it is."""
    return _SHORT.repr(value).replace("\n", " ")


def _listed(value: Any) -> Any:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


TokenIds = Annotated[list[TokenId], BeforeValidator(_listed)]
"""One id, several, or null for none."""


class Schema(BaseModel):
    """Base of all schemas. Numbers are finite and not given as text; keys that are not listed are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


AnySchema = TypeVar("AnySchema", bound=Schema)


def parse(schema: type[AnySchema], value: Any, what: str) -> AnySchema:
    """Returns ``value`` as the schema's type.

    Args:
        schema: what is expected.
        value: what a JSON file holds.
        what: the file, for the error.

    Raises:
        ModelLoadError: in one line, which fields are missing or wrong and what was expected of each.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(detail) for detail in error.errors(include_url=False)))
    shown = "; ".join(problems[:MAX_PROBLEMS])
    rest = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    raise ModelLoadError(f"{what} {shown}{rest}")


def _problem(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"lacks {field!r}"
    if detail["type"] == "value_error":  # a validator of ours, which says everything itself
        return str(detail["ctx"]["error"])
    expected = detail["msg"].removeprefix("Input ")
    return f"has {field or 'a value'} = {shortened(detail['input'])}, which {expected}"


def read_object(file: Path, schema: type[Schema] = Schema, hint: str = AGAIN) -> dict[str, Any]:
    """Returns the JSON object in a file, with the keys that the schema does not list.

    Args:
        file: where it lies.
        schema: what it has to satisfy.
        hint: what to do about a file that cannot be read.

    Raises:
        ModelLoadError: it cannot be read, is no object, or does not satisfy the schema.
    """
    found = read_json(file, hint)
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} holds a {type(found).__name__}; expected an object; {hint}")
    parse(schema, found, str(file))
    return found
