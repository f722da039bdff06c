"""Parallel sizes of a finished command: read, corrected where the local size moved, checked against GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdcluster.recipes.choice import Finding, Selection
from pdcluster.recipes.tokens import Unit, value_of
from pdcluster.recipes.topology import DP, DP_LOCAL, PP, SIZES, START_RANK, TP, layout

DCP = "--decode-context-parallel-size"
PCP = "--prefill-context-parallel-size"
_SIZE_FLAGS = (TP, PP, DP, DP_LOCAL, DCP, PCP)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes that a command asks for; `local` is the data-parallel size on this node."""

    tensor: int
    pipeline: int
    data: int
    local: int
    decode_context: int
    prefill_context: int

    @property
    def node_gpus(self) -> int:
        """GPUs that this command's replicas take; over several nodes where one replica spans them."""
        return self.tensor * self.pipeline * self.prefill_context * self.local


def read_sizes(units: Iterable[Unit]) -> Sizes | None:
    """Read the sizes of a command's units; None where one is a variable yet."""
    units = tuple(units)
    if any(unit.flag in _SIZE_FLAGS and "$" in unit.value for unit in units):
        return None

    def size(flag: str, default: int = 1) -> int:
        unit = value_of(units, flag)
        return int(unit.value) if unit is not None and unit.value.isdigit() else default

    data = size(DP)
    return Sizes(size(TP), size(PP), data, size(DP_LOCAL, data), size(DCP), size(PCP))


def correct_local_size(
    selection: Selection, rank: int, units: tuple[Unit, ...], findings: list[Finding]
) -> tuple[Unit, ...]:
    """Derive the total and the start rank from the local size that won, where a layer has moved it."""
    local = value_of(units, DP_LOCAL)
    if local is None or local.origin.layer == SIZES or not local.value.isdigit() or layout(selection) == "tp":
        return units
    size = int(local.value)
    wanted = {DP: size * selection.choice.nodes, START_RANK: size * rank}
    corrected = []
    for unit in units:
        if unit.flag in wanted and unit.origin.layer == SIZES and unit.value != str(wanted[unit.flag]):
            what = f"{unit.flag} {unit.value} becomes {wanted[unit.flag]}: the local size is {size}"
            findings.append(Finding("local-size", "correction", what, origin=local.origin))
            unit = replace(unit, tokens=(unit.flag, str(wanted[unit.flag])))  # noqa: PLW2901 - the mended one
        corrected.append(unit)
    return tuple(corrected)
