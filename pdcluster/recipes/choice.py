"""What is to be resolved: one variant, strategy and hardware of one recipe, with features and node counts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pdcluster.errors import UserError
from pdcluster.recipes.documents import Document, Key
from pdcluster.recipes.hardware import Profile
from pdcluster.recipes.names import unknown
from pdcluster.recipes.tokens import Origin

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
PD = "pd_cluster"


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """One role's pool: nodes of an instance (0: both roles share one node), the node meant, and its parallelism."""

    nodes: int
    rank: int = 0
    parallelism: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice within a recipe; `features` in the order in which they shall show, `asked` those a person named."""

    model: str
    strategy: str
    hardware: str
    variant: str = "default"
    features: tuple[str, ...] = ()
    modes: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    pools: Mapping[str, PoolChoice] | None = None
    user_args: tuple[str, ...] = ()
    kv_offload: str | None = None
    kv_store: str | None = None
    gpus_per_node: int | None = None
    asked: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice with the documents that it names."""

    choice: Choice
    recipe: Document
    strategy: Document
    taxonomy: Document
    profile: Profile
    profiles: tuple[Profile, ...]
    store: Document | None = None

    @property
    def deploy_type(self) -> str:
        """How nodes are used: single_node, multi_node or pd_cluster."""
        return str(self.strategy.get("deploy_type") or "single_node")

    @property
    def model_id(self) -> str:
        """The checkpoint that is served: the variant's own, else the recipe's."""
        found = self.recipe.get("variants", self.choice.variant, "model_id") or self.recipe.get("model", "model_id")
        return str(found or self.choice.model)

    def override(self, *path: Key) -> Any:
        """Return a value of this strategy's overrides."""
        return self.recipe.get("strategy_overrides", self.choice.strategy, *path)

    def variant(self, *path: Key) -> Any:
        """Return a value of the variant."""
        return self.recipe.get("variants", self.choice.variant, *path)

    def pool(self, role: Role) -> PoolChoice:
        """Return one role's pool as given; where it isn't, 0 nodes (co-located) at one node, else one."""
        given = (self.choice.pools or {}).get(role)
        return given or PoolChoice(nodes=0 if self.choice.nodes <= 1 else 1)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found while resolving: a refusal, a correction of the published command, or a warning."""

    rule: str
    kind: Literal["refusal", "correction", "warning"]
    what: str
    fix: str = ""
    origin: Origin | None = None

    def __str__(self) -> str:
        """Render as one line."""
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.what}{where}" + (f"; {self.fix}" if self.fix else "") + f" [{self.rule}]"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        origin = self.origin.to_json() if self.origin else None
        return {"rule": self.rule, "kind": self.kind, "what": self.what, "fix": self.fix, "origin": origin}


def select(library: Library, choice: Choice) -> Selection:
    """Find the documents of a choice; an unknown name of any kind raises `UserError` with the known ones."""
    recipe = library.recipe(choice.model)
    for kind, name, known in _names(recipe, choice, library):
        if name not in known:
            raise UserError(f"{recipe.file}: {unknown(kind, name, tuple(known))}")
    return Selection(
        choice=choice,
        recipe=recipe,
        strategy=library.strategy(choice.strategy),
        taxonomy=library.taxonomy(),
        profile=_profile(choice, library),
        profiles=tuple(library.profiles().values()),
        store=library.kv_store(choice.kv_store) if choice.kv_store else None,
    )


def _profile(choice: Choice, library: Library) -> Profile:
    """Return the hardware, with the count of GPUs that a person has given; memory goes with them."""
    profile, count = library.profile(choice.hardware), choice.gpus_per_node
    if count is None:
        return profile
    memory = profile.vram_gb * count / profile.gpu_count if profile.gpu_count else profile.vram_gb
    return replace(profile, gpu_count=count, vram_gb=memory)


def _names(recipe: Document, choice: Choice, library: Library) -> Iterator[tuple[str, str, Any]]:
    yield "variant", choice.variant, recipe.get("variants") or {}
    features = recipe.get("features") or {}
    for name in (*choice.features, *choice.modes):
        yield "feature", name, features
    for name, mode in choice.modes.items():
        yield f"mode of {name}", mode, recipe.get("features", name, "modes") or {}
    if choice.kv_offload:
        yield "KV offload", choice.kv_offload, library.taxonomy().get("kv_offload") or {}
