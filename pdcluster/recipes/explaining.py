"""Commands as people read them: one setting's history, a table, a line for a shell, two side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pdcluster.errors import UserError
from pdcluster.flags import normalise
from pdcluster.recipes.command import Command
from pdcluster.recipes.names import unknown
from pdcluster.recipes.substitution import shell_quote
from pdcluster.recipes.tokens import Unit

_WIDE = 60


def explain_lines(commands: Iterable[Command], name: str) -> list[str]:
    """Return the history of one flag or variable in every command; raises `UserError` where none has it."""
    commands = tuple(commands)
    lines: list[str] = []
    known: set[str] = set()
    for command in commands:
        known |= {unit.flag for unit in command.units if unit.flag} | {item.name for item in command.environment}
        lines += _history(command, name)
    if not lines:
        raise UserError(f"{unknown('setting', name, tuple(sorted(known)))}")
    return lines


def _history(command: Command, name: str) -> Iterator[str]:
    flag = normalise(name if name.startswith("-") else f"--{name}")
    for unit in command.units:
        if unit.flag == flag:
            yield f"{command.name}: {' '.join(unit.tokens)}"
            yield f"  from {unit.origin}"
            for older in reversed(unit.displaced):
                yield f"  instead of {' '.join(older.tokens)}, from {older.origin}"
    for setting in command.environment:
        if setting.name == name:
            yield (
                f"{command.name}: {name}={setting.value}" if setting.value is not None else f"{command.name}: no {name}"
            )
            yield f"  from {setting.origin}"
            for value, origin in reversed(setting.displaced):
                yield f"  instead of {value}, from {origin}"


def table_lines(commands: Iterable[Command]) -> list[str]:
    """Return commands as lines: each argument and variable, and where it is from.

    Of a further node of the same part only what differs from the first is shown.
    """
    lines: list[str] = []
    first: dict[str | None, Command] = {}
    for command in commands:
        known = first.setdefault(command.role, command)
        same = known is not command
        seen = set(_rows(known)) if same else set()
        lines.append(f"{command.name}: " + (f"as {known.name}, but" if same else f"vllm serve {command.model}"))
        rows = [row for row in _rows(command) if row not in seen]
        width = min(_WIDE, max((len(text) for text, _ in rows), default=0))
        for text, origin in rows:
            lines += [f"  {text:<{width}}  {origin}"] if len(text) <= width else [f"  {text}", f"    {origin}"]
        lines.append("")
    return lines


def _rows(command: Command) -> list[tuple[str, str]]:
    rows = [(" ".join(unit.tokens), str(unit.origin)) for unit in command.units]
    settings = (item for item in command.environment if item.value is not None)
    return rows + [(f"{item.name}={item.value}", str(item.origin)) for item in settings]


def shell_line(command: Command) -> str:
    """Return one line for a POSIX shell; the recipe's variables are left for it to fill in."""
    settings = [f"{name}={shell_quote(value)}" for name, value in command.env.items()]
    return " ".join([*settings, *(shell_quote(token) for token in command.argv)])


def differences(left: Iterable[Command], right: Iterable[Command]) -> list[dict[str, Any]]:
    """Return the settings that differ, command by command: both values and origins, None where absent."""
    sides = [{command.name: _settings(command) for command in commands} for commands in (left, right)]
    rows = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        one, two = (side.get(name, {}) for side in sides)
        for setting in dict.fromkeys([*one, *two]):
            before, after = one.get(setting), two.get(setting)
            if (before and before[0]) != (after and after[0]):
                rows.append(
                    {
                        "command": name,
                        "setting": setting,
                        "left": before[0] if before else None,
                        "left_origin": before[1] if before else None,
                        "right": after[0] if after else None,
                        "right_origin": after[1] if after else None,
                    }
                )
    return rows


def _settings(command: Command) -> dict[str, tuple[str, str]]:
    found = {"model": (command.model, "variant")}
    found |= {unit.flag or unit.tokens[0]: (_shown(unit), str(unit.origin)) for unit in command.units}
    return found | {
        setting.name: (setting.value, str(setting.origin))
        for setting in command.environment
        if setting.value is not None
    }


def _shown(unit: Unit) -> str:
    return unit.value or "(set)"
