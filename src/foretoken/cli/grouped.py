"""Commands whose options are the fields of dataclasses."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from foretoken.core.checks import option_of
from foretoken.core.errors import InvalidRequest

_ANNOTATED: Any = Annotated  # with types that are known at runtime only
_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def option(default: Any, help: str, *names: str, **details: Any) -> Any:
    """Declares an option: the default of a dataclass's field, or of a parameter of a ``grouped`` command.

    Args:
        default: The value if the option is not passed.
        help: Its help.
        names: Its names, by default the field's.
        details: Further keywords of ``typer.Option``.
    """
    return dataclasses.field(default=default, metadata={"typer": typer.Option(*names, help=help, **details)})


def grouped(
    command: Callable[..., None] | None = None, /, *, without: Collection[str] = (), **usual: Any
) -> Callable[..., Any]:
    """Returns a command for typer in which every field of a dataclass is a parameter, in order.

    There are two kinds of dataclasses:

    * Options: fields are declared by ``option``, have annotations of typer's parameters, or are dataclasses again.
    * Settings, of packages that know no typer: those of ``usual``, and classes with a field that names its option (see
      ``core.checks``). Types are plain, and the class's ``Args`` are the help. A field without a default is a
      required argument. An option that is not passed leaves the usual value.

    Args:
        command: The command; None returns a decorator.
        without: Fields of settings that get no option.
        usual: By parameter, an instance of its dataclass, whose values are the defaults.
    """
    if command is None:
        return partial(grouped, without=without, **usual)
    signature = inspect.signature(command, eval_str=True)
    given = signature.parameters.values()
    group = _joined(command, {each.name: _group(each, usual.get(each.name), without) for each in given})

    @wraps(command)
    def call(**values: Any) -> None:
        group.value(values)

    call.__signature__ = signature.replace(parameters=group.parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in group.parameters}
    return call


class _Group(NamedTuple):
    """Parameters of typer, and a function that makes the value of one parameter of ours from theirs."""

    parameters: list[Parameter]
    value: Callable[[Mapping[str, Any]], Any]


def _joined(make: Callable[..., Any], groups: Mapping[str, _Group]) -> _Group:
    """Returns the group of a call of ``make``, which has a keyword for each of ``groups``."""
    return _Group(
        [each for group in groups.values() for each in group.parameters],
        lambda values: make(**{name: group.value(values) for name, group in groups.items()}),
    )


def _group(parameter: Parameter, usual: Any = None, without: Collection[str] = ()) -> _Group:
    kind: Any = parameter.annotation
    if usual is None and not is_dataclass(kind):
        return _Group([_single(parameter)], lambda values: values[parameter.name])
    if usual is not None or any("option" in field.metadata for field in fields(kind)):
        return _settings(kind() if usual is None else usual, without)
    hints = get_type_hints(kind, include_extras=True)
    return _joined(kind, {f.name: _group(_parameter(f.name, hints[f.name], _default(f))) for f in fields(kind)})


def _single(parameter: Parameter) -> Parameter:
    kind, default = parameter.annotation, parameter.default
    if isinstance(default, Field):
        kind, default = _ANNOTATED[kind, default.metadata["typer"]], default.default
    return _parameter(parameter.name, kind, default)


def _parameter(name: str, kind: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _default(field: Field[Any]) -> Any:
    return field if "typer" in field.metadata else Parameter.empty if field.default is MISSING else field.default


def _settings(usual: Any, without: Collection[str]) -> _Group:
    """Returns the group of a dataclass of settings, with its usual values. Its value raises InvalidRequest."""
    options = dict(_options(usual, without))

    def value(values: Mapping[str, Any]) -> Any:
        passed = {field: values[option.name] for field, option in options.items()}
        return _applied(usual, {field: value for field, value in passed.items() if value is not None})

    return _Group(list(options.values()), value)


def _options(settings: Any, without: Collection[str]) -> Iterator[tuple[str, Parameter]]:
    """Yields each field's name and the parameter of its option. An option that is not passed is None."""
    hints, helps = get_type_hints(type(settings)), _helps(type(settings))
    for field in fields(settings):
        option = option_of(field.name, field.metadata)
        if option is None or field.name in without:
            continue
        kinds = [kind for kind in (get_args(hints[field.name]) or (hints[field.name],)) if kind is not NoneType]
        kind = kinds[0] if kinds[0] in (int, float, bool, Path) else str
        if field.default is MISSING:
            argument = typer.Argument(metavar=field.name.upper(), help=helps[field.name])
            yield field.name, _parameter(field.name, _ANNOTATED[kind, argument])
            continue
        negated = f"{option}/--no-{option[2:]}" if kind is bool and getattr(settings, field.name) is None else option
        text = helps[field.name] + _shown_default(settings, field)
        annotation = _ANNOTATED[kind | None, typer.Option(negated, help=text, min=field.metadata.get("min"))]
        yield field.name, _parameter(option[2:].replace("-", "_"), annotation, None)


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
            described = (field.metadata.get("typer"), *get_args(hints[field.name]))
            option = next((each for each in described if isinstance(each, OptionInfo)), None)
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
