"""One instance -> vLLM's argv and environment, each setting with its origin. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdcluster.flags import POOL_FLAGS, SIZE_FLAGS, find_flag
from pdcluster.inventory import VISIBLE_VARIABLE, Kind
from pdcluster.kv_events import events_argument
from pdcluster.kv_transfer import side_channel_environment, transfer_argument
from pdcluster.model_facts import Checkpoint, ModelFacts
from pdcluster.node_args import node_arguments, serves
from pdcluster.recipes.tokens import Origin, keep_last, units_of
from pdcluster.spec import AUTO_LENGTH, PoolSpec, Role
from pdcluster.spec_loading import LoadedSpec

# Works with every build of vLLM; the `vllm` console script of the CPU build doesn't.
MODULE = "vllm.entrypoints.openai.api_server"

CPU_CONTEXT = 4096
CPU_KV_BYTES = 300_000_000
# Routes that return the tokens of a request's prompt, exact for every API.
_RENDER, _NO_RENDER = "--enable-scale-out", "--no-enable-scale-out"
_CPU_ORIGIN = "default on CPU hosts"
_PLAN_ORIGIN = "plan"

# Used on CPU hosts where the spec says nothing: bfloat16 has no fast kernel on AVX2, and vLLM's own default KV
# size is a share of the host's memory for each engine.
CPU_DEFAULTS: Mapping[str, str | int | bool] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": CPU_KV_BYTES,
    "enforce_eager": True,
}

# Inherited variables that an engine must not see, and why. A pool's `env` can still set the rest of vLLM's.
SCRUBBED: Mapping[str, str] = {
    "VLLM_PORT": "numbers internal ports from one base, so engines on one host collide; Kubernetes sets it to a URL",
    "VLLM_HOST_IP": "is one address for every engine",
    "VLLM_API_KEY": "would make engines refuse the proxy and the pair checks (set PDCLUSTER_ENGINE_API_KEY instead: "
    "they know that one too)",
    "VLLM_PLUGINS": "would keep our plugin from loading",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "is set for each instance",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "is set for each instance",
    "VLLM_CPU_KVCACHE_SPACE": "is whole GiB and fights the exact KV size",
    "VLLM_CPU_OMP_THREADS_BIND": "is set for each instance",
    "VLLM_RPC_BASE_PATH": "would be shared by every engine",
    "VLLM_LOGGING_CONFIG_PATH": "may send the log away from the run directory",
    "PDCLUSTER_NIXL_POLL_US": "is set for each instance",
}
# The key that engines ask for, in the launcher's and the proxy's environment; an engine gets it under vLLM's name.
ENGINE_KEY_VARIABLE = "PDCLUSTER_ENGINE_API_KEY"
# Secrets that an engine has no use for.
PROXY_SECRETS = (ENGINE_KEY_VARIABLE, "PDCLUSTER_API_KEYS")
SCRUBBED_PREFIXES = ("VLLM_DP_", "VLLM_SERVICE_", "VLLM_PORT_")


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag with its value, as tokens of an argv, and where it came from."""

    tokens: tuple[str, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of an instance and where it came from.

    With `taken_from` the value is that of this variable in the launcher's environment, filled in at the start: a secret
    never stands in a plan.
    """

    name: str
    value: str
    origin: str
    taken_from: str | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an instance runs: its host, devices or cores, and the first of each of its port ranges."""

    role: Role
    host: str
    kind: Kind
    devices: tuple[int, ...]
    threads: int
    binding: str
    http_port: int
    side_channel_port: int
    events_port: int
    replay_port: int  # 0 where no KV events are published
    dp_rpc_port: int
    nodes: int = 1
    node: int = 0  # which of them, from 0
    head: str = ""  # the first one's address, where there are several


def scrub(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that break engines."""
    return {
        name: value
        for name, value in environment.items()
        if name not in SCRUBBED and not name.startswith(SCRUBBED_PREFIXES)
    }


def build_arguments(loaded: LoadedSpec, slot: Slot, checkpoint: Checkpoint) -> tuple[Argument, ...]:
    """Return every argument after `python -m MODULE`."""
    spec = loaded.spec
    pool = getattr(spec.pools, slot.role)
    arguments = [
        Argument(("--model", checkpoint.location), loaded.origin("model")),
        Argument(("--served-model-name", spec.served_name), loaded.origin("served_model_name")),
        Argument(("--host", slot.host), loaded.origin("host")),
        Argument(("--port", str(slot.http_port)), _PLAN_ORIGIN),
        *_pool_arguments(loaded, slot, pool, checkpoint.facts),
        Argument(
            ("--kv-transfer-config", transfer_argument(spec, slot.role, slot.kind)),
            loaded.origin("connector"),
        ),
    ]
    arguments += [Argument(tokens, _PLAN_ORIGIN) for tokens in node_arguments(pool, slot.node, slot.head)]
    if pool.data_parallel_size > 1:
        arguments.append(Argument(("--data-parallel-rpc-port", str(slot.dp_rpc_port)), _PLAN_ORIGIN))
    if find_flag(pool.extra_args, "--shutdown-timeout") is None:
        seconds = str(int(spec.launch.stop_grace))
        arguments.append(Argument(("--shutdown-timeout", seconds), loaded.origin("launch.stop_grace")))
    if pool.extra_args:
        arguments += _extra_arguments(loaded, f"pools.{slot.role}.extra_args", pool.extra_args)
    return tuple(arguments)


def _extra_arguments(loaded: LoadedSpec, path: str, tokens: tuple[str, ...]) -> Iterator[Argument]:
    """Yield the extra arguments; a recipe's are told apart flag by flag, and of one flag the last stays."""
    if loaded.recipe is None:
        yield Argument(tokens, loaded.origin(path))
        return
    for unit in keep_last(units_of(tokens, Origin("extra_args"))):
        declared = loaded.recipe.document["pools"][path.split(".")[1]]["extra_args"]
        theirs = set(unit.tokens) <= set(declared)
        yield Argument(unit.tokens, loaded.origin(f"{path}.{unit.flag}" if theirs else path))


def _pool_arguments(loaded: LoadedSpec, slot: Slot, pool: PoolSpec, facts: ModelFacts | None) -> Iterator[Argument]:
    def origin(field: str) -> str:
        return loaded.origin(f"pools.{slot.role}.{field}")

    for field, flag in SIZE_FLAGS.items():
        if getattr(pool, field) != 1:
            yield Argument((flag, str(getattr(pool, field))), origin(field))
    if pool.enable_expert_parallel:
        yield Argument(("--enable-expert-parallel",), origin("enable_expert_parallel"))
    defaults = _host_defaults(slot.kind, facts)
    for field, flag in POOL_FLAGS.items():
        value = getattr(pool, field)
        if field == "max_model_len" and value == AUTO_LENGTH:
            yield Argument((flag, "auto"), origin(field))
        elif value is not None:
            yield Argument((flag, str(value)), origin(field))
        elif field in defaults:
            yield Argument((flag, str(defaults[field])), _CPU_ORIGIN)
    eager = defaults.get("enforce_eager", False) if pool.enforce_eager is None else pool.enforce_eager
    if eager:
        yield Argument(("--enforce-eager",), _CPU_ORIGIN if pool.enforce_eager is None else origin("enforce_eager"))
    if pool.kv_events:
        text = events_argument(slot.host, slot.events_port, slot.replay_port)
        yield Argument(("--kv-events-config", text), origin("kv_events"))
        if find_flag(pool.extra_args, _RENDER) is None and find_flag(pool.extra_args, _NO_RENDER) is None:
            yield Argument((_RENDER,), origin("kv_events"))
    if pool.speculative is not None:
        text = json.dumps(pool.speculative.config(), separators=(",", ":"))
        yield Argument(("--speculative-config", text), origin("speculative"))


def _host_defaults(kind: Kind, facts: ModelFacts | None) -> dict[str, str | int | bool]:
    if kind != "cpu":
        return {}
    longest = facts.max_model_len if facts else None
    return {**CPU_DEFAULTS, "max_model_len": min(CPU_CONTEXT, longest or CPU_CONTEXT)}


def build_environment(loaded: LoadedSpec, slot: Slot, *, offline: bool, keyed: bool = False) -> tuple[Variable, ...]:
    """Return what the plan sets on top of the inherited, scrubbed environment; a pool's `env` wins.

    `offline` is true for a local checkpoint: the engine then never asks a model hub. `keyed` is true where engines ask
    for a key.
    """
    pool = getattr(loaded.spec.pools, slot.role)
    # Of ranks on several nodes the first one's server speaks for all; with data parallelism each node has its own.
    speaker = slot.head if slot.nodes > 1 and not serves(pool, slot.node) else slot.host
    planned = side_channel_environment(speaker, slot.side_channel_port, slot.kind)
    planned["VLLM_NO_USAGE_STATS"] = "1"
    planned["PYTHONHASHSEED"] = "0"
    if offline:
        planned["HF_HUB_OFFLINE"] = "1"
    if slot.kind == "cpu":
        planned |= {"OMP_NUM_THREADS": str(slot.threads), "VLLM_CPU_OMP_THREADS_BIND": slot.binding}
    else:
        planned[VISIBLE_VARIABLE[slot.kind]] = ",".join(str(index) for index in slot.devices)
    variables = [Variable(name, value, _PLAN_ORIGIN) for name, value in planned.items() if name not in pool.env]
    variables += [
        Variable(name, value, loaded.origin(f"pools.{slot.role}.env.{name}")) for name, value in pool.env.items()
    ]
    if keyed:
        variables.append(Variable("VLLM_API_KEY", "", ENGINE_KEY_VARIABLE, taken_from=ENGINE_KEY_VARIABLE))
    return tuple(sorted(variables, key=lambda variable: variable.name))
