"""Hardware profiles, and how a recipe's maps are looked up by hardware. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GPUS_VARIABLE = "$GPUS_PER_NODE"

NVIDIA = "NVIDIA"
# Where the four-GPU trays of one rack share an NVLink domain.
NVL4_HARDWARE = frozenset({"gb200", "gb300"})


@dataclass(frozen=True, slots=True)
class Unknown:
    """A count that no source declares: a variable, or a shell's arithmetic over it, until a person says the number."""

    text: str = GPUS_VARIABLE[1:]

    def __mul__(self, other: int) -> Unknown:
        """Return the product as text."""
        return self if other == 1 else Unknown(f"{self.text}*{other}")

    def __floordiv__(self, other: int) -> Unknown:
        """Return the quotient, rounded down, as text."""
        return self if other == 1 else Unknown(f"{self.text}/{other}")

    def __str__(self) -> str:
        """Render as a POSIX shell reads it."""
        return GPUS_VARIABLE if self.text == GPUS_VARIABLE[1:] else f"$(({self.text}))"


Count = int | Unknown


@dataclass(frozen=True, slots=True)
class Profile:
    """One node of a kind of hardware; `vram_gb` is all its GPUs together, in GB as the vendor counts.

    0 GPUs or GB: no source says how many.
    """

    id: str
    brand: str
    generation: str
    gpu_count: int
    vram_gb: float
    display_name: str = ""
    scalable: bool = True
    restricted: bool = False

    @property
    def gpus(self) -> Count:
        """The GPUs of a node, as a number or as what stands for it."""
        return self.gpu_count or Unknown()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a keyed map that may speak of this hardware, the most exact first."""
        return (self.id, self.generation, self.brand.lower(), "default")


def at_least_one(count: Count) -> Count:
    """Return a count, but one where it would be less."""
    return max(1, count) if isinstance(count, int) else count


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
