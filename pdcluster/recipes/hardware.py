"""Hardware profiles, and how a recipe's maps are looked up by hardware. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NVIDIA = "NVIDIA"
# Where the four-GPU trays of one rack share an NVLink domain.
NVL4_HARDWARE = frozenset({"gb200", "gb300"})


@dataclass(frozen=True, slots=True)
class Profile:
    """One node of a kind of hardware; `vram_gb` is all its GPUs together, in GB as the vendor counts."""

    id: str
    brand: str
    generation: str
    gpu_count: int
    vram_gb: float
    display_name: str = ""
    scalable: bool = True
    restricted: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a keyed map that may speak of this hardware, the most exact first."""
        return (self.id, self.generation, self.brand.lower(), "default")


def keyed(table: Any, profile: Profile) -> tuple[str, Any] | None:
    """Return (key, value) of the first key that is present and not null: exact id, generation, brand, default."""
    if not isinstance(table, dict):
        return None
    for key in profile.keys:
        if table.get(key) is not None:
            return key, table[key]
    return None


def block_key(table: Any, profile: Profile) -> str | None:
    """Return the key of the generation's block; `nvidia` only where the generation's own key is absent."""
    if not isinstance(table, dict):
        return None
    if profile.generation in table:
        return profile.generation
    return "nvidia" if profile.brand == NVIDIA and "nvidia" in table else None
