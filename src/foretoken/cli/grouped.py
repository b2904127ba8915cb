"""Commands whose options are dataclasses, one for each topic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo

from foretoken.core.errors import InvalidRequest


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command for typer in which every field of a dataclass is a parameter.

    Parameters of ``command`` that are annotated with a dataclass become its fields, in order; the fields may be
    dataclasses again. Annotations of fields are those of typer's parameters.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = signature.parameters.values()
    parameters = [each for group in groups for each in _expanded(group)]

    @wraps(command)
    def call(**values: Any) -> None:
        command(**{group.name: _value(group.name, group.annotation, values) for group in groups})

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _expanded(parameter: Parameter) -> Iterator[Parameter]:
    group = parameter.annotation
    if not is_dataclass(group):
        yield parameter.replace(kind=Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield from _expanded(
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
        )


def _value(name: str, annotation: Any, values: Mapping[str, Any]) -> Any:
    """Returns the value of a parameter, a dataclass of its fields' values where it is one."""
    if not is_dataclass(annotation):
        return values[name]
    group: Any = annotation
    hints = get_type_hints(group)
    return group(**{field.name: _value(field.name, hints[field.name], values) for field in fields(group)})


def given_options(*groups: Any) -> list[str]:
    """Returns the options of dataclasses whose values differ from their defaults, without those of the environment."""
    result = []
    for group in groups:
        hints = get_type_hints(type(group), include_extras=True)
        for field in fields(group):
            value = getattr(group, field.name)
            option = next((each for each in get_args(hints[field.name]) if isinstance(each, OptionInfo)), None)
            if is_dataclass(value):
                result += given_options(value)
            elif option is not None and option.envvar is None and value != field.default:
                named = [name for name in option.param_decls or () if name.startswith("--")]
                result.append(named[0] if named else f"--{field.name.replace('_', '-')}")
    return result


def refuse_options(given: Sequence[str], reason: str) -> None:
    """Raises InvalidRequest for the first of the options that were given. reason: follows its name."""
    if given:
        raise InvalidRequest(f"{given[0]} {reason}")


ALONE = "goes with --endpoint URL; name the server, or leave it out"
SERVED = "does not go with --endpoint; leave it or --endpoint out"
