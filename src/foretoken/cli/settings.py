"""Commands whose options are generated from dataclasses of settings: names, types, defaults and help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, replace
from functools import wraps
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from foretoken.core.errors import InvalidRequest
from foretoken.train.config import option_of

_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def with_settings(without: Collection[str] = (), **usual: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces parameters of a command by the options of settings.

    Args:
        without: Fields that get no option.
        usual: By parameter, a dataclass instance. Each field becomes an option with the instance's value as its
            default, one without a default a required argument. The command gets a copy with the passed values.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        options = {name: dict(_options(settings, without)) for name, settings in usual.items()}
        parameters: list[Parameter] = []
        for name, parameter in signature.parameters.items():
            listed = options[name].values() if name in options else (parameter,)
            parameters += [p.replace(kind=Parameter.KEYWORD_ONLY) for p in listed]

        @wraps(command)
        def call(**values: Any) -> None:
            for name, settings in usual.items():
                passed = {field: values.pop(p.name) for field, p in options[name].items()}
                values[name] = _applied(settings, {f: value for f, value in passed.items() if value is not None})
            command(**values)

        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def _options(settings: Any, without: Collection[str]) -> Iterator[tuple[str, Parameter]]:
    """Yields each field's name and the parameter of its option. An option that is not passed is None."""
    annotated: Any = Annotated  # with types that are known at runtime only
    hints, helps = get_type_hints(type(settings)), _helps(type(settings))
    for field in fields(settings):
        option = option_of(field.name, field.metadata)
        if option is None or field.name in without:
            continue
        kinds = [kind for kind in (get_args(hints[field.name]) or (hints[field.name],)) if kind is not NoneType]
        kind = kinds[0] if kinds[0] in (int, float, bool, Path) else str
        if field.default is MISSING:
            argument = annotated[kind, typer.Argument(metavar=field.name.upper(), help=helps[field.name])]
            yield field.name, Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=argument)
            continue
        negated = f"{option}/--no-{option[2:]}" if kind is bool and getattr(settings, field.name) is None else option
        text = helps[field.name] + _shown_default(settings, field)
        annotation = annotated[kind | None, typer.Option(negated, help=text)]
        name = option[2:].replace("-", "_")
        yield field.name, Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _helps(settings: type) -> dict[str, str]:
    """Returns the help of each field, from the ``Args`` of the class and of those it inherits from."""
    entries: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        entries |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.cleandoc(kind.__doc__ or ""))}
    return entries


def _shown_default(settings: Any, field: Field[Any]) -> str:
    value = getattr(settings, field.name)
    if value is None or value is False or (field.name == "steps" and settings.minutes is not None):
        return ""
    return f"  [default: {value if isinstance(value, str) else format(value, 'g')}]"


def _applied(settings: Any, passed: Mapping[str, Any]) -> Any:
    """Returns the settings with the values that were passed. Raises InvalidRequest."""
    given: dict[str, Any] = dict(passed)
    if "steps" in given:
        if "minutes" in given:
            raise InvalidRequest("both --steps and --minutes are given; choose one")
        given["minutes"] = None
    if "taps" in given:
        given["taps"] = _layers(given["taps"])
    return replace(settings, **given)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise InvalidRequest(f"--taps {text!r}; expected layer numbers like 2,4,5") from None
