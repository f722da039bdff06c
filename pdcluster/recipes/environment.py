"""The environment of one command: layers, a pool's placement, and variables that only NVL4 trays understand. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster.recipes.choice import Role, Selection
from pdcluster.recipes.extras import extra_environment
from pdcluster.recipes.hardware import NVL4_HARDWARE
from pdcluster.recipes.layers import environment
from pdcluster.recipes.pools import configured_mode, cut_rank, first_node, placement
from pdcluster.recipes.scalars import as_text
from pdcluster.recipes.tokens import Origin

NVL4_VARIABLES = (
    "VLLM_USE_NCCL_SYMM_MEM",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NVLS_ENABLE",
    "UCX_NET_DEVICES",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: its value (None: removed), where it came from, and the (value, origin) pairs that it displaced."""

    name: str
    value: str | None
    origin: Origin
    displaced: tuple[tuple[str | None, Origin], ...] = ()


def settings_of(selection: Selection, role: Role | None, mode: str, *, published: bool) -> tuple[Setting, ...]:
    """Return the environment of one command; `mode` is the parallelism that its pool really has."""
    settings: dict[str, Setting] = {}
    for layer in environment(selection, role):
        if layer is None:
            if role:
                origin = Origin("pool placement", note=f"{selection.pool(role).nodes} nodes of {selection.profile.id}")
                for name, value in placement(selection, role).items():
                    _put(settings, name, value, origin)
            continue
        for name, value in (layer.value or {}).items():
            _put(settings, name, as_text(value), Origin(layer.name, layer.document, (*layer.path, name)))
    for name, value, origin in extra_environment(selection, role):
        _put(settings, name, value, origin)
    if role:
        if selection.profile.id not in NVL4_HARDWARE:
            for name in NVL4_VARIABLES:
                if name in settings:
                    _put(settings, name, None, Origin("removed", note="only gb200 and gb300 trays have its fabric"))
        _side_channel(settings, selection, role, mode, published=published)
    return tuple(settings.values())


def _put(settings: dict[str, Setting], name: str, value: str | None, origin: Origin) -> None:
    before = settings.get(name)
    displaced = (*before.displaced, (before.value, before.origin)) if before else ()
    settings[name] = Setting(name, value, origin, displaced)


def _side_channel(
    settings: dict[str, Setting], selection: Selection, role: Role, mode: str, *, published: bool
) -> None:
    """In a dep pool every node is its own server: what names the pool's first node means the node itself."""
    rank = selection.pool(role).rank if published else cut_rank(selection, role)
    if (configured_mode(selection, role) if published else mode) != "dep" or rank <= 0:
        return
    own = f"${role.upper()}_NODE_{rank + 1}"
    for name, setting in list(settings.items()):
        if setting.value == first_node(role):
            _put(settings, name, own, Origin("pool placement", note=f"node {rank + 1} of a dep pool"))
