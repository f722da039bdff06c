"""Command-line tokens as units of a flag and its values, each with its origin; of one flag the last stays. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdcluster.flags import is_number, normalise
from pdcluster.recipes.documents import Document, KeyPath, show_path

# Flags that vLLM 0.32 appends for each time they stand; of every other flag the last one counts.
REPEATABLE = frozenset({"--middleware"})


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a setting comes from: the layer's name, and its key path in a file (none for what was worked out)."""

    layer: str
    document: Document | None = None
    path: KeyPath = ()
    note: str = ""

    @property
    def file(self) -> str | None:
        """The file's name, None for what no file says."""
        return self.document.file if self.document else None

    @property
    def line(self) -> int | None:
        """The line in the file."""
        return self.document.line(self.path) if self.document else None

    def __str__(self) -> str:
        """Render as one line: layer, file and line, key path."""
        if self.document is None:
            return f"{self.layer}: {self.note}" if self.note else self.layer
        source = self.document.source(self.path)
        return f"{self.layer}: {self.document.where(self.path)}" + (f", declared at {source}" if source else "")

    def to_json(self) -> dict[str, str | int | None]:
        """Return plain data."""
        source = self.document.source(self.path) if self.document else None
        path = show_path(self.path) or None
        found = {"layer": self.layer, "file": self.file, "line": self.line, "path": path, "source": source}
        return {**found, "note": self.note} if self.note else found


@dataclass(frozen=True, slots=True)
class Unit:
    """A flag with its values, or bare tokens where `flag` is None; `displaced` are earlier units of the flag."""

    flag: str | None
    tokens: tuple[str, ...]
    origin: Origin
    displaced: tuple[Unit, ...] = ()

    @property
    def value(self) -> str:
        """The flag's value as text, "" where it has none."""
        inline = self.tokens[0].partition("=")[2] if self.tokens[0].startswith("-") else ""
        return " ".join(([inline] if inline else []) + list(self.tokens[1:]))


def units_of(tokens: Iterable[str], origin: Origin) -> list[Unit]:
    """Split one layer's tokens into units; a negative number after a flag is its value, empty tokens are dropped."""
    groups: list[list[str]] = []
    open_flag = False
    for token in tokens:
        if not token:
            continue
        if is_flag(token):
            groups.append([token])
            open_flag = "=" not in token
        elif open_flag:
            groups[-1].append(token)
        else:
            groups.append([token])
    return [Unit(normalise(group[0]) if is_flag(group[0]) else None, tuple(group), origin) for group in groups]


def is_flag(token: str) -> bool:
    """Tell whether a token names a flag; "-1" does not."""
    return token.startswith("-") and len(token) > 1 and not is_number(token)


def keep_last(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Keep the last unit of each flag, where it stands, with what it displaced; bare tokens all stay."""
    last: dict[str, int] = {}
    older: dict[str, list[Unit]] = {}
    for index, unit in enumerate(units):
        if unit.flag is not None and unit.flag not in REPEATABLE:
            if unit.flag in last:
                older.setdefault(unit.flag, []).append(units[last[unit.flag]])
            last[unit.flag] = index
    kept = []
    for index, unit in enumerate(units):
        if unit.flag is None or unit.flag in REPEATABLE:
            kept.append(unit)
        elif last[unit.flag] == index:
            displaced = older.get(unit.flag)
            kept.append(replace(unit, displaced=tuple(displaced)) if displaced else unit)
    return tuple(kept)


def flat(units: Iterable[Unit]) -> list[str]:
    """Return the tokens in order."""
    return [token for unit in units for token in unit.tokens]


def value_of(units: Iterable[Unit], flag: str) -> Unit | None:
    """Return the unit of a flag by its long name, None where it is absent."""
    found = None
    for unit in units:
        if unit.flag == flag:
            found = unit
    return found
