"""What the user asked for: the model, the two pools, the connector and the proxy.

The classes here are the YAML format of `--config`; `pdcluster schema` prints it as JSON Schema. Names are
vLLM's own where vLLM has one. Reading files and flags into a spec is `spec_loading`'s work.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

ROLES = ("prefill", "decode")
Role = Literal["prefill", "decode"]

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_LENGTH = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgG]?)$")


def parse_length(value: object) -> object:
    """Turn "128k" or "1M" into a number, as vLLM does: lower case is decimal, upper case binary."""
    if not isinstance(value, str):
        return value
    match = _LENGTH.match(value.strip())
    if match is None:
        raise ValueError('a count is a whole number, or one with a suffix such as "128k" or "1M"')
    return int(float(match[1]) * _SUFFIXES.get(match[2], 1))


AUTO_LENGTH = -1


def _parse_model_length(value: object) -> object:
    """Turn "auto" into vLLM's number for it, and everything else as `parse_length` does."""
    return AUTO_LENGTH if value == "auto" else parse_length(value)


def _positive_or_auto(value: int) -> int:
    if value < 1 and value != AUTO_LENGTH:
        raise ValueError('a context is greater than 0, or "auto"')
    return value


def _stringify_values(value: object) -> object:
    """Let environment values be written as YAML numbers or booleans; a process sees strings."""
    if not isinstance(value, dict):
        return value
    plain = {True: "1", False: "0"}
    return {
        key: plain[item] if isinstance(item, bool) else str(item) if isinstance(item, int | float) else item
        for key, item in value.items()
    }


_COUNT_SCHEMA = {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": _LENGTH.pattern}]}
_MODEL_LENGTH_SCHEMA = {"anyOf": [*_COUNT_SCHEMA["anyOf"], {"enum": ["auto", AUTO_LENGTH]}]}
_ENVIRONMENT_SCHEMA = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
Length = Annotated[PositiveInt, BeforeValidator(parse_length), WithJsonSchema(_COUNT_SCHEMA)]
ModelLength = Annotated[
    int, AfterValidator(_positive_or_auto), BeforeValidator(_parse_model_length), WithJsonSchema(_MODEL_LENGTH_SCHEMA)
]
Size = Annotated[int, Field(ge=1, le=1024)]
Port = Annotated[int, Field(ge=1, le=65535)]
# Programs run in the run directory, so a relative path is taken from where the launcher was started.
LocalFile = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]
Environment = Annotated[dict[str, str], BeforeValidator(_stringify_values), WithJsonSchema(_ENVIRONMENT_SCHEMA)]


class Section(BaseModel):
    """A part of the spec: unknown keys are refused, values don't change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SpeculativeSpec(BaseModel):
    """Speculative decoding of one pool; any further key of vLLM's `--speculative-config` passes through."""

    model_config = ConfigDict(extra="allow", frozen=True)

    method: str | None = Field(None, description="ngram, suffix, eagle, eagle3, mtp, draft_model, ...")
    model: str | None = Field(None, description="draft model, where the method needs one")
    num_speculative_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _names_a_method(self) -> SpeculativeSpec:
        if self.method is None and self.model is None:
            raise ValueError("set method (for instance ngram) or model (a draft model)")
        return self

    def config(self) -> dict[str, Any]:
        """Return what `--speculative-config` takes: the keys that were set, in a stable order."""
        return self.model_dump(exclude_none=True)


class RecipeSpec(Section):
    """Published settings that lie under what is set here; `pdcluster recipe show ID` lists the choices."""

    id: Annotated[str, Field(min_length=1)] = Field(description="such as moonshotai/Kimi-K3")
    directory: LocalFile | None = Field(None, description="recipes in the format; default: those shipped")
    variant: str | None = None
    hardware: str | None = None
    strategy: str | None = Field(None, description="pd_cluster; `plan` prints others too, and a table of all")
    features: tuple[str, ...] = Field((), description="added to the recipe's default selection: NAME or NAME=MODE")
    without: tuple[str, ...] = Field((), description="taken out of the default selection")
    prefill_parallelism: str | None = Field(None, description="tp, tep or dep; default: the recipe's")
    decode_parallelism: str | None = None
    colocated: bool = Field(False, description="prefill and decode share one node's devices")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    variables: dict[str, str] = Field(default_factory=dict, description="the recipe's variables, such as IFACE_NAME")
    below_floor: bool = Field(False, description="allow fewer devices than the recipe's floor")
    any_strategy: bool = Field(False, description="use pd_cluster though the recipe doesn't offer it")
    any_vllm: bool = Field(False, description="start with a vLLM older than the recipe asks for")


class PoolSpec(Section):
    """All instances of one role; the fields are vLLM's engine arguments of the same name."""

    replicas: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="instances in this pool")
    nodes: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="hosts that one instance is spread over")
    hosts: tuple[str, ...] | None = Field(
        None, description="addresses, one for each node of each instance in turn; default: this host"
    )
    tensor_parallel_size: Size = 1
    pipeline_parallel_size: Size = 1
    data_parallel_size: Size = 1
    enable_expert_parallel: bool = Field(
        False, description="experts over all TP x DP ranks; the expert-parallel size is their product"
    )
    decode_context_parallel_size: Size = Field(1, description="must divide tensor_parallel_size")
    dcp_comm_backend: str | None = Field(None, description="vLLM's --dcp-comm-backend, such as ag_rs or a2a")
    dcp_kv_cache_interleave_size: PositiveInt | None = None
    prefill_context_parallel_size: Size = Field(1, description="prefill pool only")
    speculative: SpeculativeSpec | None = None
    max_model_len: ModelLength | None = Field(
        None, description='tokens; "128k" and "1M" are understood, "auto" (-1) is what fits'
    )
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: Length | None = None
    block_size: PositiveInt | None = Field(None, description="tokens in a KV block")
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of the device's memory that one instance may use"
    )
    kv_cache_memory_bytes: Length | None = Field(None, description="exact KV bytes; overrides the memory share")
    dtype: str | None = None
    quantization: str | None = None
    load_format: str | None = None
    enforce_eager: bool | None = None
    kv_events: bool = Field(
        False,
        description="publish which KV blocks are held, and render prompts, for the proxy's exact index of prefixes",
    )
    extra_args: tuple[str, ...] = Field((), description="appended to vLLM's argv as they are")
    env: Environment = Field(default_factory=dict, description="environment of every instance of this pool")
    devices: tuple[int, ...] | None = Field(
        None, description="device indices that this pool may use; default: any free one"
    )

    @property
    def world_size(self) -> int:
        """Number of devices that one instance takes (TP x PP x PCP x DP); DCP reuses the TP ranks."""
        return (
            self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
            * self.data_parallel_size
        )

    @property
    def spans_hosts(self) -> bool:
        """Tell whether the pool's instances are on hosts of their own."""
        return self.nodes > 1 or self.hosts is not None


class PoolsSpec(Section):
    """The two pools."""

    prefill: PoolSpec = PoolSpec()
    decode: PoolSpec = PoolSpec()

    def items(self) -> tuple[tuple[Role, PoolSpec], ...]:
        """Return (role, pool) in plan order: prefill first."""
        return (("prefill", self.prefill), ("decode", self.decode))


class ProxySpec(Section):
    """The one endpoint in front of the pools."""

    host: str = Field("127.0.0.1", description="address to listen on; beyond loopback only when asked")
    port: Port = 8000
    fallback: Literal["decode", "none"] = Field(
        "decode", description="when no prefill is usable: decode serves alone, or 503"
    )
    max_body_mb: PositiveInt = 64
    workers: Annotated[int, Field(ge=1, le=256)] = Field(1, description="processes that serve the endpoint")
    api_key_file: LocalFile | None = Field(
        None, description="YAML of clients' API keys, `name: key`; PDCLUSTER_API_KEYS adds more. None: no key is asked"
    )
    requests_per_minute: PositiveInt | None = Field(None, description="for each API key that has no limit of its own")
    tokens_per_minute: PositiveInt | None = Field(None, description="likewise, prompt and answer together")
    tls_certificate: LocalFile | None = Field(None, description="PEM, with its chain: the endpoint is HTTPS then")
    tls_key: LocalFile | None = Field(None, description="the certificate's private key, PEM without a passphrase")
    tls_client_ca: LocalFile | None = Field(
        None, description="CA in PEM: clients must show a certificate that it signed; needs admin_port"
    )
    admin_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="a second port for health, readiness and metrics over plain HTTP; 0 is none"
    )
    cors_origins: tuple[Origin, ...] = Field(
        (), description="origins whose web pages may call the endpoint, such as https://app.example; * is any"
    )
    extra_args: tuple[str, ...] = Field((), description="further flags of `pdcluster proxy`")

    @property
    def tls(self) -> bool:
        """Tell whether the endpoint speaks HTTPS."""
        return self.tls_certificate is not None


class PortsSpec(Section):
    """Where the engines' own ports begin; each instance takes one block of them."""

    base: Annotated[int, Field(ge=1024, le=65000)] = 18100


class LaunchSpec(Section):
    """How the launcher starts, checks and stops instances. Times are in seconds."""

    ready_timeout: PositiveFloat = Field(1800.0, description="longest wait for an instance's /health")
    stop_grace: PositiveFloat = Field(30.0, description="time for running streams to end at a stop")
    restart_limit: Annotated[int, Field(ge=0)] = Field(
        5, description="restarts of one instance without a healthy minute between them; then it stays down"
    )
    parity: bool = Field(True, description="compare each pair's greedy answer with the aggregated one")
    parity_tolerance: PositiveFloat | None = Field(
        None,
        description="gap of the top two log-probabilities that excuses a differing token; "
        "default 1e-4 with float32, 0.05 otherwise",
    )


class ClusterSpec(Section):
    """The whole cluster, as one YAML document."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        "default", description="names the run directory; one launcher a name"
    )
    model: Annotated[str, Field(min_length=1)] = Field(
        "smollm2", description="embedded model, directory of a checkpoint, or model id"
    )
    served_model_name: str | None = Field(None, description="default: model as given")
    recipe: RecipeSpec | None = Field(None, description="published settings under those of this spec")
    connector: Literal["nixl"] = "nixl"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_lease_duration: Annotated[int, Field(ge=6)] | None = Field(
        None, description="seconds that prefill keeps KV for decode to fetch; default 30 (vLLM's own), 120 on CPU hosts"
    )
    host: str = Field("127.0.0.1", description="address of the engines and of their side channels")
    pools: PoolsSpec = PoolsSpec()
    ports: PortsSpec = PortsSpec()
    proxy: ProxySpec = ProxySpec()
    launch: LaunchSpec = LaunchSpec()

    @property
    def served_name(self) -> str:
        """Return the model name that clients use."""
        return self.served_model_name or self.model
