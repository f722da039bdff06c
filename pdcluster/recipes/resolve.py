"""One selection -> argv and environment of every node, each setting with its origin and what it displaced. Pure.

Two readings: as published (what the recipe project's own resolver gives), and corrected, where the published command
cannot work. Corrections and refusals are named findings; nothing is mended silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pdcluster.recipes.checks import check_commands, check_selection
from pdcluster.recipes.choice import PD, ROLES, Finding, Role, Selection
from pdcluster.recipes.command import Command
from pdcluster.recipes.environment import settings_of
from pdcluster.recipes.extras import extra_layers
from pdcluster.recipes.features import additions, feature_findings
from pdcluster.recipes.layers import Layer, arguments_after_sizes, arguments_before_sizes
from pdcluster.recipes.offers import pool_modes
from pdcluster.recipes.pools import cut_rank, effective_mode, pool_units
from pdcluster.recipes.scalars import as_text
from pdcluster.recipes.sizes import correct_local_size
from pdcluster.recipes.tokens import Origin, Unit, keep_last, units_of
from pdcluster.recipes.topology import HYBRID_LB, node_names, size_units

# One token that holds a flag and its value, blank between them: argparse would read it as the model.
_GLUED = re.compile(r"^(--[^\s={\[\"']+)\s+(.+)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Resolution:
    """A selection resolved: its commands by name, and what was found on the way."""

    selection: Selection
    commands: tuple[Command, ...]
    findings: tuple[Finding, ...]

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """Return the refusals, corrections or warnings."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def plain(self) -> dict[str, dict[str, Any]]:
        """Return {name: {"argv", "env"}}."""
        return {command.name: {"argv": command.argv, "env": command.env} for command in self.commands}


def resolve(selection: Selection, *, published: bool = False) -> Resolution:
    """Resolve a selection; with `published` exactly as the recipe's own project does, faults and all."""
    findings: list[Finding] = []
    if selection.choice.strategy == PD:
        commands = tuple(_pool_command(selection, role, findings, published=published) for role in ROLES)
    else:
        names = node_names(selection)
        commands = tuple(
            _node_command(selection, name, rank, findings, published=published) for rank, name in enumerate(names)
        )
    if published:
        return Resolution(selection, commands, ())
    findings += check_selection(selection)
    findings += feature_findings(selection)
    findings += check_commands(selection, commands)
    return Resolution(selection, commands, tuple(dict.fromkeys(findings)))


def _node_command(selection: Selection, name: str, rank: int, findings: list[Finding], *, published: bool) -> Command:
    sizes = size_units(selection, rank, published=published)
    units = _assemble(selection, None, sizes, findings, published=published)
    if not published:
        units = correct_local_size(selection, rank, units, findings)
        added = next((unit for unit in units if unit.flag == HYBRID_LB and unit.origin.layer == "correction"), None)
        if added:
            what = f"{HYBRID_LB} is added: without it the head expects headless followers and vLLM refuses the others"
            findings.append(Finding("tp-dp-hybrid-lb", "correction", what, origin=added.origin))
    return Command(name, None, rank, selection.model_id, units, settings_of(selection, None, "tp", published=published))


def _pool_command(selection: Selection, role: Role, findings: list[Finding], *, published: bool) -> Command:
    mode = effective_mode(selection, role, pool_modes(selection.recipe))
    sizes = pool_units(selection, role, mode, published=published)
    units = _assemble(selection, role, sizes, findings, published=published)
    settings = settings_of(selection, role, mode, published=published)
    return Command(role, role, cut_rank(selection, role), selection.model_id, units, settings)


def _assemble(
    selection: Selection, role: Role | None, sizes: list[Unit], findings: list[Finding], *, published: bool
) -> tuple[Unit, ...]:
    units: list[Unit] = []
    for layer in arguments_before_sizes(selection, role):
        units += _layer_units(layer, findings, published=published)
    units += sizes
    for layer in arguments_after_sizes(selection, role):
        units += _layer_units(layer, findings, published=published)
    units += units_of(selection.choice.user_args, Origin("user", note="free arguments"))
    for layer in (*_feature_layers(selection), *extra_layers(selection, role)):
        units += _layer_units(layer, findings, published=published)
    return keep_last(units)


def _feature_layers(selection: Selection) -> Iterator[Layer]:
    for addition in additions(selection):
        if addition.path is not None:
            yield Layer(f"feature {addition.feature}", selection.recipe, addition.path)


def _layer_units(layer: Layer, findings: list[Finding], *, published: bool) -> list[Unit]:
    value = layer.value
    if not value:
        return []
    tokens = [as_text(item) for item in value]
    if not published and any(" " in token for token in tokens):
        tokens = list(_split_glued(tokens, layer, findings))
    return units_of(tokens, Origin(layer.name, layer.document, layer.path))


def _split_glued(tokens: Iterable[str], layer: Layer, findings: list[Finding]) -> Iterator[str]:
    for index, token in enumerate(tokens):
        match = _GLUED.match(token) if " " in token else None
        if match is None:
            yield token
            continue
        origin = Origin(layer.name, layer.document, (*layer.path, index))
        what = f"{token!r} is one token and is split: vLLM would read it as the model's name"
        findings.append(Finding("split-token", "correction", what, origin=origin))
        yield from match.groups()
