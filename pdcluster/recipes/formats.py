"""The shapes of a recipe directory's files: which keys the format knows, and what each holds.

Read in the vllm-project/recipes collection at revision 8959cf64 (2026-08-21); `sources`, `facts` and `rules` are this
project's own keys of shipped recipes and say who declared what.
"""

from __future__ import annotations

from pdcluster.recipes.shapes import (
    BOOL,
    DATE,
    LOOSE,
    NUMBER,
    TEXT,
    WHOLE,
    Anything,
    Either,
    Keys,
    ListOf,
    MapOf,
)

TOKENS = ListOf(LOOSE)
ENVIRONMENT = MapOf(LOOSE)
NAMES = ListOf(TEXT)
_ANY = Anything()
_SIZE_BY_HARDWARE = Either((WHOLE, MapOf(WHOLE)))
_BLOCK = Keys(
    {"extra_args": TOKENS, "extra_env": ENVIRONMENT, "docker_image": _ANY, "install_note": TEXT, "description": TEXT}
)
_BLOCKS = MapOf(_BLOCK)
_FEATURE_BLOCKS = MapOf(Keys({"args": TOKENS, "description": TEXT}))

_META = Keys(
    {
        "title": TEXT,
        "slug": TEXT,
        "provider": TEXT,
        "description": TEXT,
        "date_added": DATE,
        "date_updated": DATE,
        "difficulty": TEXT,
        "tasks": NAMES,
        "performance_headline": TEXT,
        "related_recipes": NAMES,
        "default_hardware": TEXT,
        "hardware": MapOf(TEXT),
        "platforms": _ANY,
    }
)
_MODEL = Keys(
    {
        "model_id": TEXT,
        "min_vllm_version": TEXT,
        "nightly_required": BOOL,
        "install": _ANY,
        "docker_image": _ANY,
        "docker_source": _ANY,
        "architecture": TEXT,
        "parameter_count": TEXT,
        "active_parameters": TEXT,
        "context_length": WHOLE,
        "base_args": TOKENS,
        "base_env": ENVIRONMENT,
        "supports_dcp": BOOL,
        "flashinfer_autotune": BOOL,
    }
)
_MODE = Keys(
    {
        "label": TEXT,
        "description": TEXT,
        "args": TOKENS,
        "variants": NAMES,
        "hardware": MapOf(TEXT),
        "hardware_overrides": _FEATURE_BLOCKS,
    }
)
# `hardware` stands on plain features in one recipe and is read by nobody: it is left out, so that it is warned about.
_FEATURE = Keys(
    {
        "label": TEXT,
        "description": TEXT,
        "args": TOKENS,
        "strategies": NAMES,
        "hardware_overrides": _FEATURE_BLOCKS,
        "default_mode": TEXT,
        "modes": MapOf(_MODE),
    }
)
_VARIANT = Keys(
    {
        "label": TEXT,
        "description": TEXT,
        "model_id": TEXT,
        "precision": TEXT,
        "precision_hardware": MapOf(Either((TEXT, NAMES))),
        "supported_hardware": NAMES,
        "vram_minimum_gb": NUMBER,
        "min_vllm_version": TEXT,
        "nightly_required": BOOL,
        "docker_image": _ANY,
        "extra_args": TOKENS,
        "extra_env": ENVIRONMENT,
        "hardware_overrides": _BLOCKS,
        "tp": _SIZE_BY_HARDWARE,
        "default_modes": MapOf(TEXT),
    }
)
_ROLE = Keys(
    {
        "parallelism": TEXT,
        "parallel_flag": TEXT,
        "tp": WHOLE,
        "nodes": _SIZE_BY_HARDWARE,
        "extra_args": TOKENS,
        "vllm_args": TOKENS,
        "env": ENVIRONMENT,
        "hardware_overrides": _BLOCKS,
    }
)
_OVERRIDE = Keys(
    {
        "extra_args": TOKENS,
        "vllm_args": TOKENS,
        "env": ENVIRONMENT,
        "extra_env": ENVIRONMENT,
        "tp": _SIZE_BY_HARDWARE,
        "hardware_overrides": _BLOCKS,
        "pool_modes": NAMES,
        "router": _ANY,
        "prefill": _ROLE,
        "decode": _ROLE,
    }
)

RECIPE = Keys(
    {
        "meta": _META,
        "model": _MODEL,
        "features": MapOf(_FEATURE),
        "opt_in_features": NAMES,
        "hardware_opt_in_features": MapOf(NAMES),
        "variants": MapOf(_VARIANT),
        "compatible_strategies": NAMES,
        "default_strategy": TEXT,
        "strategy_hardware": MapOf(MapOf(TEXT)),
        "strategy_min_gpus": Either((WHOLE, MapOf(Either((WHOLE, MapOf(WHOLE)))))),
        "strategy_overrides": MapOf(_OVERRIDE),
        "hardware_overrides": _BLOCKS,
        "kv_offload_support": MapOf(TEXT),
        "dependencies": _ANY,
        "hardware_notes": _ANY,
        "omni": _ANY,
        "guide": TEXT,
        "sources": MapOf(Keys({"url": TEXT, "revision": TEXT, "date": DATE, "licence": TEXT, "note": TEXT})),
        "facts": MapOf(TEXT),
        "rules": ListOf(
            Keys({"name": TEXT, "variants": NAMES, "hardware": NAMES, "reason": TEXT, "instead": TEXT, "source": TEXT})
        ),
    }
)

_STRATEGY_ROLE = Keys({"vllm_args": TOKENS, "env": ENVIRONMENT})
STRATEGY = Keys(
    {
        "name": TEXT,
        "deploy_type": TEXT,
        "display_name": TEXT,
        "orientation": TEXT,
        "description": TEXT,
        "hardware_match": _ANY,
        "parallelism": TEXT,
        "parallel_flag": TEXT,
        "vllm_args": TOKENS,
        "env": ENVIRONMENT,
        "prefill": _STRATEGY_ROLE,
        "decode": _STRATEGY_ROLE,
        "router": _ANY,
    }
)

_PROFILE = Keys(
    {
        "brand": TEXT,
        "generation": TEXT,
        "display_name": TEXT,
        "description": TEXT,
        "gpu_count": WHOLE,
        "vram_gb": NUMBER,
        "multi_node": BOOL,
        "scalable": BOOL,
        "restricted": BOOL,
    }
)
_OFFLOAD = Keys(
    {
        "display_name": TEXT,
        "label": TEXT,
        "order": NUMBER,
        "group": TEXT,
        "description": TEXT,
        "args": TOKENS,
        "env": ENVIRONMENT,
        "strategies": NAMES,
        "brands": NAMES,
        "requires_opt_in": BOOL,
        "install": _ANY,
        "docs_url": TEXT,
        "companion": _ANY,
    }
)
TAXONOMY = Keys(
    {
        "hardware_profiles": MapOf(_PROFILE),
        "tasks": _ANY,
        "strategies": NAMES,
        "kv_offload": MapOf(_OFFLOAD),
        "kv_offload_groups": _ANY,
        "sources": _ANY,
        "facts": MapOf(TEXT),
    }
)

_STORE_ROLE = Keys({"args": TOKENS, "env": ENVIRONMENT})
KV_STORE = Keys(
    {
        "name": TEXT,
        "deploy_type": TEXT,
        "display_name": TEXT,
        "label": TEXT,
        "order": NUMBER,
        "description": TEXT,
        "router": _ANY,
        "vllm": Keys({"vllm_args": TOKENS, "env": ENVIRONMENT, "install": _ANY, "port": WHOLE}),
        "pd": Keys({"prefill": _STORE_ROLE, "decode": _STORE_ROLE}),
        "mooncake_master": _ANY,
        "mooncake_store_config": _ANY,
        "mooncake_vllm_config": _ANY,
        "min_vllm_version": TEXT,
        "default_instances": WHOLE,
    }
)
