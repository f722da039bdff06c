"""Every command that recipes can give through the installed vLLM's own parser, each failure with its cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster.argv_check import Parsed, run_parser, vllm_version
from pdcluster.errors import UserError
from pdcluster.flag_facts import FLAG_FACTS, Cause, is_older
from pdcluster.flags import normalise
from pdcluster.recipes.library import Library
from pdcluster.recipes.names import did_you_mean
from pdcluster.recipes.references import dangling
from pdcluster.recipes.survey import Surveyed, survey
from pdcluster.recipes.tokens import Unit, value_of

_UNRECOGNIZED = re.compile(r"unrecognized arguments: (-[^\s=]+)")
_ARGUMENT = re.compile(r"argument (-[^\s/:]+)[^:]*: (.*)")
_FIELD = re.compile(r"validation errors? for \w+ (\w+)")
_WORD = 3  # a shorter token stands in a message by chance
_LINKS = re.compile(r"\s*(For further information visit \S+|\(parameter=\w+\))")


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that vLLM refuses: where it stands, why, what to do, and how many commands it stops."""

    where: str
    message: str
    cause: Cause
    hint: str
    commands: int
    example: str


@dataclass(frozen=True, slots=True)
class Lint:
    """What was found: counts, failures by cause, names that nothing answers to, floors above the installed vLLM."""

    vllm: str
    recipes: int
    commands: int
    accepted: int
    failures: tuple[Failure, ...]
    floors: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        failures = [
            {name: getattr(failure, name) for name in ("where", "message", "cause", "hint", "commands", "example")}
            for failure in self.failures
        ]
        return {
            "vllm": self.vllm,
            "recipes": self.recipes,
            "commands": self.commands,
            "accepted": self.accepted,
            "failures": failures,
            "floors": list(self.floors),
            "warnings": list(self.warnings),
        }


Parser = Callable[[Mapping[str, list[str]]], Parsed]


def lint(library: Library, environment: Mapping[str, str], say: Callable[[str], None]) -> Lint:
    """Parse every distinct command of a library with the installed vLLM; raises `UserError` without one."""
    version = vllm_version()
    if version is None:
        raise UserError("vLLM, whose parser checks recipes, is not installed here: pip install 'pdcluster[cpu]'")

    def parse(arguments: Mapping[str, list[str]]) -> Parsed:
        say(f"parsing {len(arguments):,} distinct commands with vLLM {version}'s own parser (it takes 15 s to import)")
        return run_parser(arguments, environment)

    return lint_with(library, version, parse, say)


def lint_with(library: Library, version: str, parse: Parser, say: Callable[[str], None]) -> Lint:
    """Do the same with a parser that is given."""
    models = library.models()
    say(f"resolving every combination of {len(models)} recipes")
    surveyed = [item for model in models for item in survey(library, model)]
    texts = [("--model", item.model, *item.arguments) for item in surveyed]
    distinct = {text: str(number) for number, text in enumerate(dict.fromkeys(texts))}
    parsed = parse({key: list(text) for text, key in distinct.items()})
    refused = [
        (item, parsed.errors[distinct[text]])
        for item, text in zip(surveyed, texts, strict=True)
        if parsed.errors[distinct[text]]
    ]
    warnings = [*library.warnings(), *(line for model in models for line in dangling(library, library.recipe(model)))]
    return Lint(
        vllm=version,
        recipes=len(models),
        commands=len(surveyed),
        accepted=len(surveyed) - len(refused),
        failures=tuple(_group(refused, parsed.flags, version)),
        floors=tuple(_floors(library, models, version)),
        warnings=tuple(warnings),
    )


def _group(refused: Sequence[tuple[Surveyed, str]], flags: Sequence[str], version: str) -> list[Failure]:
    """Make one failure of all commands that fail for one setting of one recipe."""
    groups: dict[tuple[str, str, Cause, str], list[Surveyed]] = {}
    for item, message in refused:
        groups.setdefault(_explain(item, message, flags, version), []).append(item)
    return [Failure(*key, len(items), items[0].case) for key, items in sorted(groups.items())]


def _explain(item: Surveyed, message: str, flags: Sequence[str], version: str) -> tuple[str, str, Cause, str]:
    message = _LINKS.sub("", message)
    unit, fact_name, known = _culprit(item, message, flags)
    if item.plugin and not known:
        fact_name, unit = item.plugin, value_of(item.units, item.plugin) or unit
    where = unit.origin.document.where(unit.origin.path) if unit and unit.origin.document else item.case
    fact = FLAG_FACTS.get(fact_name)
    if fact is not None:
        return where, message, fact.cause, f"{fact.instead} (seen in vLLM {fact.absent})"
    if known:
        return where, message, "error in recipe", "mend the value"
    hint = did_you_mean(fact_name, flags)
    if item.minimum_vllm and is_older(version, item.minimum_vllm):
        return where, message, "newer flag", f"the recipe asks for vLLM {item.minimum_vllm}, this is {version}; {hint}"
    return where, message, "error in recipe", hint or f"vLLM {version} has no flag like it"


def _culprit(item: Surveyed, message: str, flags: Sequence[str]) -> tuple[Unit | None, str, bool]:
    """Return (the unit that is refused, its flag or flag.field, whether vLLM knows the flag)."""
    unrecognized = _UNRECOGNIZED.search(message)
    if unrecognized:
        flag = normalise(unrecognized[1])
        return value_of(item.units, flag), flag, flag in flags
    argument = _ARGUMENT.search(message)
    if argument:
        flag = normalise(argument[1])
        field = _FIELD.search(argument[2])
        dotted = next(
            (unit for unit in item.units if field and unit.flag == f"{flag}.{field[1]}".replace("_", "-")), None
        )
        name = f"{flag}.{field[1]}" if field else flag
        return dotted or _last_of(item, flag), name, True
    quoted = [
        (token, unit) for unit in item.units for token in unit.tokens[1:] if len(token) > _WORD and token in message
    ]
    named = max(quoted, key=lambda pair: len(pair[0]), default=(None, None))[1]
    return named, named.flag if named and named.flag else "", True


def _last_of(item: Surveyed, flag: str) -> Unit | None:
    found = [unit for unit in item.units if unit.flag and unit.flag.partition(".")[0] == flag]
    return found[-1] if found else None


def _floors(library: Library, models: Sequence[str], version: str) -> list[str]:
    lines = []
    for model in models:
        recipe = library.recipe(model)
        places = [("model",), *(("variants", name) for name in recipe.get("variants") or {})]
        for path in places:
            floor = recipe.get(*path, "min_vllm_version")
            if floor and is_older(version, str(floor)):
                lines.append(f"{recipe.where((*path, 'min_vllm_version'))}: needs vLLM {floor}, this is {version}")
    return lines
