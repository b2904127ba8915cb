"""Commands whose options are the fields of dataclasses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from foretoken.core.errors import InvalidRequest
from foretoken.core.settings import option_of

_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def grouped(
    command: Callable[..., None] | None = None, /, *, without: Collection[str] = (), **usual: Any
) -> Callable[..., Any]:
    """Returns a command for typer in which every field of a dataclass is a parameter, in order.

    There are two kinds of dataclasses:

    * Options: fields have annotations of typer's parameters, or are dataclasses again.
    * Settings, of packages that know no typer: those of ``usual``, and classes with a field that has ``metadata`` (see
      ``core.settings``). Types are plain, and the class's ``Args`` are the help. A field without a default is a
      required argument. An option that is not passed leaves the usual value.

    Args:
        command: The command; None returns a decorator.
        without: Fields of settings that get no option.
        usual: By parameter, an instance of its dataclass, whose values are the defaults.
    """
    if command is None:
        return partial(grouped, without=without, **usual)
    signature = inspect.signature(command, eval_str=True)
    groups = [_group(each, usual.get(each.name), without) for each in signature.parameters.values()]
    parameters = [each for group in groups for each in group.parameters]

    @wraps(command)
    def call(**values: Any) -> None:
        command(**{group.name: group.value(values) for group in groups})

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


class _Single:
    """A parameter of the command itself."""

    def __init__(self, parameter: Parameter) -> None:
        self.name = parameter.name
        self.parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY)]

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the value from those that typer passes."""
        return values[self.name]


class _Options:
    """A dataclass of options, some of which may be dataclasses."""

    def __init__(self, name: str, kind: Any) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self.name, self._kind = name, kind
        self._fields = [
            _group(Parameter(f.name, Parameter.KEYWORD_ONLY, default=_default(f), annotation=hints[f.name]), None, ())
            for f in fields(kind)
        ]
        self.parameters: list[Parameter] = [each for field in self._fields for each in field.parameters]

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the dataclass."""
        return self._kind(**{field.name: field.value(values) for field in self._fields})


class _Settings:
    """A dataclass of settings, with its usual values."""

    def __init__(self, name: str, usual: Any, without: Collection[str]) -> None:
        self.name, self._usual = name, usual
        self._options = dict(_options(usual, without))
        self.parameters = list(self._options.values())

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the usual values with those that were passed. Raises InvalidRequest."""
        passed = {field: values[option.name] for field, option in self._options.items()}
        return _applied(self._usual, {field: value for field, value in passed.items() if value is not None})


def _group(parameter: Parameter, usual: Any, without: Collection[str]) -> _Single | _Options | _Settings:
    kind: Any = parameter.annotation
    if usual is not None:
        return _Settings(parameter.name, usual, without)
    if not is_dataclass(kind):
        return _Single(parameter)
    settings = any(field.metadata for field in fields(kind))
    return _Settings(parameter.name, parameter.annotation(), without) if settings else _Options(parameter.name, kind)


def _default(field: Field[Any]) -> Any:
    return Parameter.empty if field.default is MISSING else field.default


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
        annotation = annotated[kind | None, typer.Option(negated, help=text, min=field.metadata.get("min"))]
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
