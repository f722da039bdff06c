"""What a resolution ends in: one process on one node. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster.recipes.choice import Role
from pdcluster.recipes.environment import Setting
from pdcluster.recipes.tokens import Unit, flat


@dataclass(frozen=True, slots=True)
class Command:
    """One process on one node: its name, what it serves, its units of argv and its environment."""

    name: str
    role: Role | None
    rank: int
    model: str
    units: tuple[Unit, ...]
    environment: tuple[Setting, ...]

    @property
    def argv(self) -> list[str]:
        """The whole command line."""
        return ["vllm", "serve", self.model, *flat(self.units)]

    @property
    def env(self) -> dict[str, str]:
        """The environment as a mapping."""
        return {setting.name: setting.value for setting in self.environment if setting.value is not None}
