"""What a value may be: a small language of shapes, and the check of a document against one.

A wrong type is a problem; a key that no shape knows is a warning by path with the nearest name, since the format grows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster.errors import Problem
from pdcluster.recipes.documents import Document, KeyPath
from pdcluster.recipes.names import did_you_mean

_NAMES: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value of these Python types; True is no number here."""

    types: tuple[type, ...]

    def describe(self) -> str:
        """Name the shape for a message."""
        return " or ".join(_NAMES.get(kind, kind.__name__) for kind in self.types)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of one shape."""

    item: Shape

    def describe(self) -> str:
        """Name the shape for a message."""
        return "a list"


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping whose keys are names of the author's choice."""

    value: Shape

    def describe(self) -> str:
        """Name the shape for a message."""
        return "a mapping of keys"


@dataclass(frozen=True, slots=True)
class Keys:
    """A mapping whose keys the format names."""

    known: Mapping[str, Shape]

    def describe(self) -> str:
        """Name the shape for a message."""
        return "a mapping of keys"


@dataclass(frozen=True, slots=True)
class Either:
    """One of several shapes; the first that fits the kind of value is taken."""

    options: tuple[Shape, ...]

    def describe(self) -> str:
        """Name the shape for a message."""
        return " or ".join(option.describe() for option in self.options)


@dataclass(frozen=True, slots=True)
class Anything:
    """Not looked into: read by people or by other programs."""

    def describe(self) -> str:
        """Name the shape for a message."""
        return "anything"


Shape = Scalar | ListOf | MapOf | Keys | Either | Anything

TEXT = Scalar((str,))
WHOLE = Scalar((int,))
NUMBER = Scalar((int, float))
BOOL = Scalar((bool,))
DATE = Scalar((str, dt.date))
# A token or an environment value may be written without quotes: YAML then reads a number or a truth value.
LOOSE = Scalar((str, int, float, bool))


def check_shape(document: Document, shape: Shape) -> tuple[list[Problem], list[str]]:
    """Return (problems, warnings) of a whole document."""
    problems: list[Problem] = []
    warnings: list[str] = []
    for path, what, fix, wrong in _faults(document.data, shape, ()):
        if wrong:
            problems.append(Problem(document.where(path), what, fix))
        else:
            warnings.append(f"{document.where(path)}: {what}{f' ({fix})' if fix else ''}")
    return problems, warnings


_Fault = tuple[KeyPath, str, str, bool]


def _faults(value: Any, shape: Shape, path: KeyPath) -> Iterator[_Fault]:
    if value is None or isinstance(shape, Anything):
        return
    if isinstance(shape, Either):
        shape = next((option for option in shape.options if _fits(value, option)), shape)
    if not _fits(value, shape):
        yield path, f"must be {shape.describe()}, not {_kind(value)}", "", True
        return
    if isinstance(shape, ListOf):
        for index, item in enumerate(value):
            yield from _faults(item, shape.item, (*path, index))
    elif isinstance(shape, MapOf | Keys):
        for key, item in value.items():
            if not isinstance(key, str):
                yield (*path, str(key)), f"a key must be text, not {_kind(key)}", "quote it", True
            elif isinstance(shape, MapOf):
                yield from _faults(item, shape.value, (*path, key))
            elif key in shape.known:
                yield from _faults(item, shape.known[key], (*path, key))
            else:
                yield (*path, key), "unknown key, nothing reads it", did_you_mean(key, shape.known), False


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, Scalar):
        return type(value) in shape.types
    if isinstance(shape, ListOf):
        return isinstance(value, list)
    if isinstance(shape, Either):
        return any(_fits(value, option) for option in shape.options)
    return not isinstance(shape, MapOf | Keys) or isinstance(value, dict)


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"{_NAMES.get(type(value), type(value).__name__)} ({value!r})"
