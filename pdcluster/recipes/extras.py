"""KV offload and KV stores: what they add after everything else, and with which strategies they compose. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster.recipes.choice import PD, Finding, Role, Selection
from pdcluster.recipes.documents import KeyPath
from pdcluster.recipes.layers import Layer
from pdcluster.recipes.scalars import as_text
from pdcluster.recipes.tokens import Origin


def extra_layers(selection: Selection, role: Role | None) -> Iterator[Layer]:
    """Yield the argument layers of the chosen KV offload and KV store."""
    offload, store = selection.choice.kv_offload, selection.store
    if offload and selection.choice.strategy != PD:
        yield Layer(f"KV offload {offload}", selection.taxonomy, ("kv_offload", offload, "args"))
    if store is not None:
        path: KeyPath = ("pd", role, "args") if role else ("vllm", "vllm_args")
        yield Layer(f"KV store {selection.choice.kv_store}", store, path)


def extra_environment(selection: Selection, role: Role | None) -> Iterator[tuple[str, str, Origin]]:
    """Yield (name, value, origin) of what KV offload and KV store set."""
    offload, store = selection.choice.kv_offload, selection.store
    if offload and selection.choice.strategy != PD:
        path: KeyPath = ("kv_offload", offload, "env")
        for name, value in (selection.taxonomy.get(*path) or {}).items():
            yield name, as_text(value), Origin(f"KV offload {offload}", selection.taxonomy, (*path, name))
    if store is not None:
        places: list[KeyPath] = [("vllm", "env")]
        if role:
            places.append(("pd", role, "env"))
        for path in places:
            for name, value in (store.get(*path) or {}).items():
                yield name, as_text(value), Origin(f"KV store {selection.choice.kv_store}", store, (*path, name))


def extra_findings(selection: Selection) -> Iterator[Finding]:
    """Yield why the chosen KV offload doesn't go with the strategy, the hardware or the recipe."""
    name = selection.choice.kv_offload
    if name is None:
        return
    option = selection.taxonomy.get("kv_offload", name) or {}
    strategies, brands = option.get("strategies") or (), option.get("brands") or ()
    if selection.choice.strategy == PD:
        what = f"KV offload {name}: pd_cluster owns --kv-transfer-config"
        yield Finding("offload-with-pd", "refusal", what, "use a KV store, which composes with NIXL")
    elif strategies and selection.choice.strategy not in strategies:
        what = f"KV offload {name} works with {', '.join(strategies)} only"
        yield Finding("offload-strategy", "refusal", what, "choose one of them")
    if brands and selection.profile.brand not in brands:
        what = (
            f"KV offload {name} works on {', '.join(brands)} only, {selection.profile.id} is {selection.profile.brand}"
        )
        yield Finding("offload-brand", "refusal", what, "choose another option")
    if option.get("requires_opt_in") and selection.recipe.get("kv_offload_support", name) != "verified":
        what = f"KV offload {name} is offered only by recipes that record a verified run of it"
        yield Finding("offload-unverified", "refusal", what, "choose another option")
