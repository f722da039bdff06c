"""What works but may surprise: settings that a layer throws away, tuning that a more general layer undoes. Pure.

All of it is resolved as the recipe says; the reader is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from pdcluster.recipes.choice import PD, ROLES, Finding, Selection
from pdcluster.recipes.command import Command
from pdcluster.recipes.documents import show_path
from pdcluster.recipes.layers import generation_blocks, replacing_block
from pdcluster.recipes.offers import pool_modes
from pdcluster.recipes.pools import effective_mode
from pdcluster.recipes.tokens import Unit, value_of

# Read in vLLM 0.32: backend -> the generation that has its kernels, and what that is called there.
_BACKEND_GENERATION: Mapping[str, tuple[str, str]] = {
    "TOKENSPEED_MLA": ("blackwell", "compute capability 10"),
    "FLASHMLA": ("hopper", "compute capability 9"),
}


def cautions(selection: Selection, commands: Iterable[Command]) -> Iterator[Finding]:
    """Yield one warning for each surprise in a resolved selection."""
    commands = tuple(commands)
    yield from _thrown_away(selection)
    yield from _never_read(selection)
    for command in commands:
        for unit in command.units:
            yield from _undone(unit)
            yield from _json_lost(unit)
        yield from _removed(selection, command)
        yield from _two_spellings_of_one_json(command)
        yield from _backend(selection, command)
        yield from _encoder(command)


def _thrown_away(selection: Selection) -> Iterator[Finding]:
    replacing = replacing_block(selection)
    for path in generation_blocks(selection) if replacing else ():
        block = selection.recipe.get(*path) or {}
        flags = [str(token) for token in block.get("extra_args") or () if str(token).startswith("-")]
        lost = [*flags, *(block.get("extra_env") or {})]
        if lost and replacing:
            what = f"{show_path(replacing)} replaces {show_path(path)}: without {', '.join(lost)}"
            yield Finding("block-replaced", "warning", what)


def _never_read(selection: Selection) -> Iterator[Finding]:
    recipe = selection.recipe
    for key in recipe.get("hardware_overrides") or {}:
        if any(profile.id == key for profile in selection.profiles):
            what = f"{recipe.where(('hardware_overrides', key))} is not read: only generations are, at this level"
            yield Finding("never-read", "warning", what)
    if selection.choice.strategy != PD:
        return
    for key in ("extra_args", "vllm_args", "extra_env"):
        if selection.override(key):
            where = recipe.where(("strategy_overrides", PD, key))
            yield Finding("never-read", "warning", f"{where} is not read: prefill and decode have their own")
    for role in ROLES:
        mode = effective_mode(selection, role, pool_modes(recipe))
        if mode != "dep" and selection.override(role, "tp"):
            where = recipe.where(("strategy_overrides", PD, role, "tp"))
            yield Finding("never-read", "warning", f"{where} is not read in a {mode} pool: its TP is the pool's GPUs")


def _undone(unit: Unit) -> Iterator[Finding]:
    """Yield where a general layer that comes after a special one undoes its tuning."""
    if unit.origin.layer.startswith("hardware"):
        for older in unit.displaced:
            special = older.origin.layer in ("strategy override", "variant on this hardware")
            if special and older.value != unit.value:
                what = f"{unit.flag} {older.value or '(set)'} of {older.origin} becomes {unit.value or '(set)'}"
                yield Finding("tuning-undone", "warning", what, origin=unit.origin)


def _json_lost(unit: Unit) -> Iterator[Finding]:
    new = _object(unit.value)
    for older in unit.displaced if new is not None else ():
        lost = [key for key in _object(older.value) or {} if key not in (new or {})]
        if lost:
            what = f"{unit.flag} is replaced whole: {', '.join(lost)} of {older.origin} is gone"
            yield Finding("json-replaced", "warning", what, origin=unit.origin)


def _removed(selection: Selection, command: Command) -> Iterator[Finding]:
    for setting in command.environment:
        theirs = [origin for _, origin in setting.displaced if origin.document is selection.recipe]
        if setting.value is None and theirs:
            what = f"{setting.name} is removed outside gb200 and gb300, though the recipe sets it"
            yield Finding("variable-removed", "warning", what, origin=theirs[-1])


def _two_spellings_of_one_json(command: Command) -> Iterator[Finding]:
    for unit in command.units:
        whole, dot, _ = (unit.flag or "").partition(".")
        other = value_of(command.units, whole) if dot else None
        if other is not None:
            what = f"{command.name}: both {unit.flag} and {whole} stand; vLLM merges them"
            yield Finding("dotted-and-whole", "warning", what, origin=unit.origin)


def _backend(selection: Selection, command: Command) -> Iterator[Finding]:
    unit = value_of(command.units, "--attention-backend")
    needs = _BACKEND_GENERATION.get(unit.value) if unit is not None else None
    if unit is not None and needs is not None and selection.profile.generation != needs[0]:
        what = f"{unit.value} needs {needs[1]} ({needs[0]}) in vLLM 0.32; {selection.profile.id} will refuse it"
        fix = f"leave out what sets it ({unit.origin.layer})"
        yield Finding("backend-hardware", "warning", what, fix, unit.origin)


def _encoder(command: Command) -> Iterator[Finding]:
    mode = value_of(command.units, "--mm-encoder-tp-mode")
    if mode is not None and value_of(command.units, "--language-model-only") is not None:
        kind = "refusal" if mode.origin.layer == "user" else "warning"
        what = f"{command.name}: --mm-encoder-tp-mode has nothing to act on beside --language-model-only"
        fix = "leave out text_only, or the encoder's mode" if kind == "refusal" else ""
        yield Finding("text-only-with-encoder", "refusal" if kind == "refusal" else "warning", what, fix, mode.origin)


def _object(text: str) -> dict[str, object] | None:
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
