"""The classes of everything that a spec can name, by kind and name; their options are their constructors' parameters."""

import functools
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import ConfigError

KINDS = ("transform", "sparsifier", "index", "value", "lowrank", "memory", "communicator", "schedule", "outer")
_classes: dict[str, dict[str, type[Any]]] = {kind: {} for kind in KINDS}
StageClass = TypeVar("StageClass", bound=type["Stage"])


class Stage:
    """Base of all parts that a spec names.

    A subclass sets `name`, registers itself with `register`, takes its options as annotated keyword arguments with defaults,
    and keeps each in an attribute of the same name: equality, the spec string and JSON are derived from those.
    """

    kind: str
    name: str
    id: int | None = None  # the id in containers; only codecs that write a section have one
    #: Settings that the bench measures, in all combinations: option -> values. The first option makes a curve.
    sweep: dict[str, tuple] = {}

    def options(self) -> dict:
        """Return the options of this stage.

        Returns:
            Option -> value.
        """
        return {key: getattr(self, key) for key in parameters(type(self))}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stage) and type(self) is type(other) and self.options() == other.options()

    def __hash__(self) -> int:
        return hash((type(self), *self.options().items()))

    def __str__(self) -> str:
        """Return the stage as a spec names it: the options that differ from the defaults, the first one without its name."""
        text = self.name
        for position, (key, parameter) in enumerate(parameters(type(self)).items()):
            value = getattr(self, key)
            if value != parameter.default:
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                text += f":{shown}" if position == 0 else f":{key}={shown}"
        return text

    __repr__ = __str__


def parameters(cls: type[Any]) -> Mapping[str, inspect.Parameter]:
    """Return the options of a stage class, which are its constructor's parameters.

    Returns:
        Name -> parameter; read-only, because all callers get the same mapping.
    """
    return _parameters(cls)  # type: ignore[arg-type]


@functools.cache
def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    return types.MappingProxyType(
        {key: p for key, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD}
    )


def register(cls: StageClass) -> StageClass:
    """Register a stage class; a class decorator.

    Returns:
        The class.

    Raises:
        ConfigError: Its name or container id is taken.
    """
    known = _classes[cls.kind]
    if cls.name in known:
        raise ConfigError(f"{cls.kind} {cls.name!r} is registered already, by {known[cls.name].__qualname__}")
    if cls.id is not None:
        for other in known.values():
            if other.id == cls.id:
                raise ConfigError(f"{cls.kind} id {cls.id} of {cls.name!r} belongs to {other.name!r} already")
    known[cls.name] = cls
    return cls


def names(kind: str) -> list[str]:
    """List the registered stages of a kind.

    Args:
        kind: One of KINDS.

    Returns:
        Their names, sorted.
    """
    return sorted(_classes[kind])


def classes(kind: str) -> tuple[type[Any], ...]:
    """List the classes of a kind.

    Args:
        kind: One of KINDS.

    Returns:
        The registered classes, in the order of their registration.
    """
    return tuple(_classes[kind].values())


def lookup(kind: str, name: str) -> type[Any]:
    """Find a stage class.

    Args:
        kind: One of KINDS.
        name: Its name.

    Returns:
        The class.

    Raises:
        ConfigError: There is no such class; the message lists the known ones.
    """
    try:
        return _classes[kind][name]
    except (KeyError, TypeError):
        raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(names(kind))}") from None


def by_id(kind: str, id: int) -> Any:
    """Find the codec class with a container id.

    Args:
        kind: One of KINDS.
        id: The id.

    Returns:
        The class, or None.
    """
    for cls in _classes[kind].values():
        if cls.id == id is not None:
            return cls
    return None


def build(kind: str, name: str, options: dict | None = None) -> Any:
    """Make a stage.

    Args:
        kind: One of KINDS.
        name: Its name.
        options: Option -> value; a value may be a string from a spec, or of its own type from JSON.

    Returns:
        The stage.

    Raises:
        ConfigError: The name or an option is unknown, or a value does not fit.
    """
    cls = lookup(kind, name)
    known = parameters(cls)
    converted = {}
    for key, value in (options or {}).items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"{kind} {name!r} has no option {key!r}; its options: {allowed}")
        converted[key] = _convert(f"{kind} {name!r}, option {key!r}", value, known[key])
    return cls(**converted)


def _type(parameter: inspect.Parameter) -> type:
    """Return an option's type: that of its default or, where that is None, the annotation's (int for `int | None`)."""
    if parameter.default is not None:
        return type(parameter.default)
    return next(iter(typing.get_args(parameter.annotation)), parameter.annotation)


def _convert(where: str, value: Any, parameter: inspect.Parameter) -> Any:
    if value is None and parameter.default is None:
        return None
    wanted = _type(parameter)
    try:
        if wanted is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if isinstance(value, bool):
            raise ValueError
        if wanted is int and isinstance(value, float) and value != int(value):
            raise ValueError
        return wanted(value)
    except (KeyError, ValueError, TypeError, OverflowError):
        raise ConfigError(f"{where}: {value!r} is not a {wanted.__name__}") from None
