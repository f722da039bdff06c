"""A choice resolved for every node of every pool: all the commands that make one deployment. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdcluster.errors import UserError
from pdcluster.recipes.cautions import cautions
from pdcluster.recipes.choice import PD, ROLES, Choice, Finding, Selection, select
from pdcluster.recipes.command import Command
from pdcluster.recipes.resolve import resolve
from pdcluster.recipes.tokens import Unit

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library


@dataclass(frozen=True, slots=True)
class Deployment:
    """One instance of each part: commands by name (a pool's nodes numbered from 1), and what was found."""

    selection: Selection
    commands: tuple[Command, ...]
    findings: tuple[Finding, ...]

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """Return the refusals, corrections or warnings."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def refuse(self, *, below_floor: bool = False, any_strategy: bool = False) -> None:
        """Raise `UserError` with every refusal.

        `below_floor` lets too few GPUs pass, `any_strategy` a strategy that the recipe doesn't offer.
        """
        passed = {"below-floor"} if below_floor else set()
        passed |= {"strategy-not-offered"} if any_strategy else set()
        refusals = [item for item in self.of_kind("refusal") if item.rule not in passed]
        if refusals:
            raise UserError("\n".join(str(finding) for finding in refusals))

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the choice, every command with origins, findings."""
        choice = self.selection.choice
        return {
            "model": choice.model,
            "variant": choice.variant,
            "strategy": choice.strategy,
            "hardware": choice.hardware,
            "features": list(choice.features),
            "modes": dict(choice.modes),
            "nodes": choice.nodes,
            "pools": {role: {"nodes": pool.nodes} for role, pool in (choice.pools or {}).items()} or None,
            "minimum_gb": self.selection.variant("vram_minimum_gb"),
            "minimum_vllm": minimum_vllm(self.selection),
            "commands": {command.name: _command_json(command) for command in self.commands},
            "findings": [finding.to_json() for finding in self.findings],
        }


def deploy(library: Library, choice: Choice) -> Deployment:
    """Resolve a choice for all its nodes."""
    selection = select(library, choice)
    commands: list[Command] = []
    findings: list[Finding] = []
    if choice.strategy != PD:
        resolution = resolve(selection)
        commands, findings = list(resolution.commands), list(resolution.findings)
    else:
        for role in ROLES:
            for rank in range(max(1, selection.pool(role).nodes)):
                pools = {**(choice.pools or {}), role: replace(selection.pool(role), rank=rank)}
                resolution = resolve(replace(selection, choice=replace(choice, pools=pools)))
                found = next(command for command in resolution.commands if command.role == role)
                commands.append(replace(found, name=f"{role}-node-{rank + 1}"))
                findings += resolution.findings
    findings += cautions(selection, commands)
    return Deployment(selection, tuple(commands), tuple(_once(findings)))


def minimum_vllm(selection: Selection) -> str | None:
    """Return the oldest vLLM that the variant (else the recipe) declares to work with."""
    found = selection.variant("min_vllm_version") or selection.recipe.get("model", "min_vllm_version")
    return str(found) if found is not None else None


def _once(findings: list[Finding]) -> Iterator[Finding]:
    """Yield each finding once, though every node has it."""
    seen = set()
    for finding in findings:
        key = (finding.rule, finding.kind, finding.what, finding.fix)
        if key not in seen:
            seen.add(key)
            yield finding


def _command_json(command: Command) -> dict[str, Any]:
    return {
        "argv": command.argv,
        "env": command.env,
        "arguments": [_unit_json(unit) for unit in command.units],
        "environment": [
            {
                "name": setting.name,
                "value": setting.value,
                "origin": setting.origin.to_json(),
                "displaced": [{"value": value, "origin": origin.to_json()} for value, origin in setting.displaced],
            }
            for setting in command.environment
        ],
    }


def _unit_json(unit: Unit) -> dict[str, Any]:
    return {
        "tokens": list(unit.tokens),
        "origin": unit.origin.to_json(),
        "displaced": [{"tokens": list(older.tokens), "origin": older.origin.to_json()} for older in unit.displaced],
    }
