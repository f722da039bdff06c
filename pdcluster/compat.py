"""Rules that the two pools and the endpoint must meet, each with its reason and the vLLM version it was read in.

The facts are from vLLM 0.32's NIXL connector: its compatibility hash (versions, model, dtype, heads, layers,
attention backend, KV dtype, hybrid cache setting, draft model) and its checks at the handshake. vLLM finds a
mismatch at the first request; these rules find it before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdcluster.errors import Problem
from pdcluster.flags import OWNED_ENVIRONMENT, OWNED_FLAGS, find_flag, flag_names
from pdcluster.model_facts import ModelFacts
from pdcluster.spec import AUTO_LENGTH, ClusterSpec, Role, SpeculativeSpec

Check = Callable[[ClusterSpec, ModelFacts | None], Iterator[Problem]]

# Speculation that keeps no KV of its own, so that decode alone may use it.
ONE_SIDED_METHODS = ("ngram", "ngram_gpu", "suffix")

# Engine arguments in the compatibility hash that the spec has no key for: equal on both pools or on neither.
_EQUAL_EXTRA_FLAGS = (
    "--attention-backend",
    "--disable-hybrid-kv-cache-manager",
    "--revision",
    "--hf-overrides",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its name, why it holds, where that was read, and the check itself."""

    name: str
    reason: str
    source: str
    check: Check


def find_problems(spec: ClusterSpec, facts: ModelFacts | None) -> list[Problem]:
    """Return every breach, each with its key path, the reason and what would work."""
    return [
        Problem(breach.where, f"{breach.what}: {rule.reason} [{rule.name}, {rule.source}]", breach.fix)
        for rule in RULES
        for breach in rule.check(spec, facts)
    ]


def _dcp_divides_tp(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for role, pool in spec.pools.items():
        dcp, tp = pool.decode_context_parallel_size, pool.tensor_parallel_size
        if tp % dcp:
            yield Problem(
                f"pools.{role}.decode_context_parallel_size",
                f"{dcp} does not divide TP {tp}",
                _allowed({1, tp}),
            )


def _dcp_is_one_or_tp(spec: ClusterSpec, facts: ModelFacts | None) -> Iterator[Problem]:
    for role, pool in spec.pools.items():
        dcp, tp = pool.decode_context_parallel_size, pool.tensor_parallel_size
        where = f"pools.{role}.decode_context_parallel_size"
        if dcp > 1 and tp % dcp == 0 and dcp != tp:
            yield Problem(where, f"{dcp} with TP {tp}", _allowed({1, tp}))
        if dcp > 1 and facts is not None and not facts.is_mla:
            yield Problem(where, f"{dcp}, but {facts.architecture or 'the model'} has no MLA", "use 1")


def _dcp_sizes_divide(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    prefill, decode = (pool.decode_context_parallel_size for _, pool in spec.pools.items())
    if prefill > 1 and decode > 1 and max(prefill, decode) % min(prefill, decode):
        yield Problem(
            "pools.decode.decode_context_parallel_size",
            f"{decode} against prefill's {prefill}",
            "use one size",
        )


def _dcp_settings_need_dcp(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for role, pool in spec.pools.items():
        if pool.decode_context_parallel_size == 1:
            for key in ("dcp_comm_backend", "dcp_kv_cache_interleave_size"):
                if getattr(pool, key) is not None:
                    yield Problem(f"pools.{role}.{key}", "set while DCP is 1", "set decode_context_parallel_size too")


def _pcp_on_prefill_only(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    size = spec.pools.decode.prefill_context_parallel_size
    if size > 1:
        yield Problem("pools.decode.prefill_context_parallel_size", f"{size} on the decode pool", "use 1 there")


def _same_draft(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    settings = {role: _draft(pool.speculative) for role, pool in spec.pools.items()}
    if settings["prefill"] == settings["decode"]:
        return
    for role, draft in settings.items():
        if draft is not None:
            other: Role = "decode" if role == "prefill" else "prefill"
            yield Problem(
                f"pools.{role}.speculative",
                f"{draft[0]} here, {(settings[other] or ('none',))[0]} in the {other} pool",
                f"set the same method and model in both pools, or use one of {', '.join(ONE_SIDED_METHODS)}",
            )
            return


def _draft(speculative: SpeculativeSpec | None) -> tuple[str, str | None] | None:
    """Return (method, model) of speculation that keeps KV, None for the kinds that don't."""
    if speculative is None or speculative.method in ONE_SIDED_METHODS:
        return None
    return speculative.method or "draft_model", speculative.model


def _tp_sizes_divide(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    prefill, decode = (pool.tensor_parallel_size for _, pool in spec.pools.items())
    if max(prefill, decode) % min(prefill, decode):
        yield Problem(
            "pools.decode.tensor_parallel_size",
            f"{decode} against prefill's {prefill}",
            "one must divide the other",
        )


def _wider_prefill_needs_own_heads(spec: ClusterSpec, facts: ModelFacts | None) -> Iterator[Problem]:
    prefill, decode = spec.pools.prefill, spec.pools.decode
    if facts is None or facts.is_mla or prefill.tensor_parallel_size <= decode.tensor_parallel_size:
        return
    where = "pools.prefill.tensor_parallel_size"
    if facts.kv_heads is not None and prefill.tensor_parallel_size > facts.kv_heads:
        yield Problem(
            where,
            f"{prefill.tensor_parallel_size} ranks share {facts.kv_heads} KV heads",
            f"use at most {facts.kv_heads}",
        )
    if prefill.block_size != decode.block_size:
        yield Problem(
            "pools.prefill.block_size",
            f"{prefill.block_size} against decode's {decode.block_size}",
            "use one size",
        )


def _heads_divide(spec: ClusterSpec, facts: ModelFacts | None) -> Iterator[Problem]:
    heads = facts.attention_heads if facts else None
    for role, pool in spec.pools.items():
        tp = pool.tensor_parallel_size
        if heads is not None and heads % tp:
            sizes = {size for size in range(1, heads + 1) if heads % size == 0}
            yield Problem(
                f"pools.{role}.tensor_parallel_size",
                f"{tp} does not divide {heads} attention heads",
                _allowed(sizes),
            )


def _block_sizes(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    prefill, decode = spec.pools.prefill.block_size, spec.pools.decode.block_size
    if prefill is not None and decode is not None and decode % prefill:
        yield Problem("pools.decode.block_size", f"{decode} against prefill's {prefill}", "use a multiple of prefill's")
    if (prefill is None) != (decode is None):
        role = "prefill" if prefill is None else "decode"
        yield Problem(f"pools.{role}.block_size", "set in the other pool only", "set it in both pools")


def _same_types(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for key in ("dtype", "kv_cache_dtype", "quantization"):
        prefill, decode = (getattr(pool, key) for _, pool in spec.pools.items())
        if prefill != decode:
            yield Problem(
                f"pools.decode.{key}",
                f"{decode or 'default'} against prefill's {prefill or 'default'}",
                "use one in both",
            )


def _same_extra_flags(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for flag in _EQUAL_EXTRA_FLAGS:
        prefill, decode = (find_flag(pool.extra_args, flag) for _, pool in spec.pools.items())
        if prefill != decode:
            yield Problem(
                "pools.decode.extra_args",
                f"{flag} differs from the prefill pool's",
                "pass it alike in both pools",
            )


def _lengths(spec: ClusterSpec, facts: ModelFacts | None) -> Iterator[Problem]:
    longest = facts.max_model_len if facts else None
    for role, pool in spec.pools.items():
        if longest is not None and (pool.max_model_len or 0) > longest:
            yield Problem(
                f"pools.{role}.max_model_len",
                f"{pool.max_model_len} tokens, the model's config.json says {longest}",
                f"use at most {longest}",
            )
    prefill, decode = (pool.max_model_len for _, pool in spec.pools.items())
    if prefill is not None and decode is not None and AUTO_LENGTH < decode < prefill:
        yield Problem("pools.decode.max_model_len", f"{decode}, below prefill's {prefill}", f"use at least {prefill}")


def _owned_settings(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for role, pool in spec.pools.items():
        for flag in flag_names(pool.extra_args):
            if flag in OWNED_FLAGS:
                yield Problem(
                    f"pools.{role}.extra_args",
                    f"{flag} is pdcluster's own",
                    f"set {OWNED_FLAGS[flag]} instead",
                )
        for name in pool.env:
            if name in OWNED_ENVIRONMENT:
                yield Problem(f"pools.{role}.env.{name}", "is set by the plan", f"remove it; {OWNED_ENVIRONMENT[name]}")


def _events_need_a_prefix_cache(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for role, pool in spec.pools.items():
        if pool.kv_events and find_flag(pool.extra_args, "--no-enable-prefix-caching") is not None:
            yield Problem(f"pools.{role}.kv_events", "set without a prefix cache", "remove --no-enable-prefix-caching")


def _events_need_ipv4(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for role, pool in spec.pools.items():
        if pool.kv_events and ":" in spec.host and spec.host != "::1":
            yield Problem(f"pools.{role}.kv_events", f"set with host {spec.host}", "use an IPv4 address for host")


def _nodes_divide(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    for role, pool in spec.pools.items():
        ranks = pool.data_parallel_size if pool.data_parallel_size > 1 else pool.world_size
        if ranks % pool.nodes:
            kind = "data-parallel ranks" if pool.data_parallel_size > 1 else "ranks"
            sizes = {size for size in range(1, ranks + 1) if ranks % size == 0}
            yield Problem(f"pools.{role}.nodes", f"{pool.nodes} nodes for {ranks} {kind}", _allowed(sizes))


def _tls_files(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    proxy = spec.proxy
    if proxy.tls_key is not None and proxy.tls_certificate is None:
        yield Problem("proxy.tls_key", "set without a certificate", "set proxy.tls_certificate")
    if proxy.tls_certificate is not None and proxy.tls_key is None:
        yield Problem("proxy.tls_certificate", "set without its private key", "set proxy.tls_key")
    if proxy.tls_client_ca is not None and proxy.tls_certificate is None:
        yield Problem("proxy.tls_client_ca", "set without a certificate", "set proxy.tls_certificate and proxy.tls_key")


def _client_ca_needs_admin_port(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    if spec.proxy.tls_client_ca is not None and not spec.proxy.admin_port:
        yield Problem("proxy.tls_client_ca", "set without proxy.admin_port", "set proxy.admin_port to a free port")


def _any_origin_stands_alone(spec: ClusterSpec, _: ModelFacts | None) -> Iterator[Problem]:
    if "*" in spec.proxy.cors_origins and len(spec.proxy.cors_origins) > 1:
        yield Problem("proxy.cors_origins", "* beside other origins", "give * alone, or remove it")


def _allowed(sizes: set[int]) -> str:
    return "allowed: " + ", ".join(str(size) for size in sorted(sizes))


_NIXL = "vLLM 0.32, NIXL connector"
_VLLM = "vLLM 0.32"

RULES: tuple[Rule, ...] = (
    Rule("dcp-divides-tp", "decode context parallelism splits the KV of the TP ranks", _VLLM, _dcp_divides_tp),
    Rule(
        "dcp-transfer",
        "NIXL moves KV split by DCP only for MLA models and only with DCP 1 or equal to TP",
        _NIXL,
        _dcp_is_one_or_tp,
    ),
    Rule("dcp-pair", "the DCP sizes of a pair must divide one another", _NIXL, _dcp_sizes_divide),
    Rule("dcp-settings", "it would have no effect", _VLLM, _dcp_settings_need_dcp),
    Rule("pcp-prefill", "prefill context parallelism works on KV producers only", _NIXL, _pcp_on_prefill_only),
    Rule(
        "same-draft",
        "a draft model's KV belongs to the handshake, so both pools need the same one",
        _NIXL,
        _same_draft,
    ),
    Rule("tp-pair", "the TP sizes of a pair must divide one another", _NIXL, _tp_sizes_divide),
    Rule("tp-heads", "attention heads are split evenly over TP ranks", _VLLM, _heads_divide),
    Rule(
        "tp-kv-heads",
        "prefill wider than decode needs KV heads of its own for each rank and one block size",
        _NIXL,
        _wider_prefill_needs_own_heads,
    ),
    Rule("block-size", "decode's block size must be a multiple of prefill's", _NIXL, _block_sizes),
    Rule(
        "same-types",
        "it is in the handshake's compatibility hash or changes what the KV means",
        _NIXL,
        _same_types,
    ),
    Rule("same-flags", "it is in the handshake's compatibility hash", _NIXL, _same_extra_flags),
    Rule("length", "a prompt must fit the model and both pools", _VLLM, _lengths),
    Rule("events-cache", "KV events tell of blocks in the prefix cache", _VLLM, _events_need_a_prefix_cache),
    Rule("events-ipv4", "vLLM publishes KV events over IPv4 only", _VLLM, _events_need_ipv4),
    Rule("nodes", "every node of an instance has as many ranks as the next", _VLLM, _nodes_divide),
    Rule("tls-files", "HTTPS needs a certificate and its private key", "TLS", _tls_files),
    Rule(
        "client-ca",
        "the launcher has no client certificate, so it can see the proxy's readiness on the admin port only",
        "pdcluster",
        _client_ca_needs_admin_port,
    ),
    Rule("cors", "it already allows every origin", "Fetch standard", _any_origin_stands_alone),
    Rule("owned", "the plan decides it, and two values would fight", "pdcluster", _owned_settings),
)
