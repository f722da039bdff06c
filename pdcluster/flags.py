"""vLLM's command-line flags as this project knows them: spellings, and which of them the plan owns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

# Fields of a PoolSpec that become one flag with the field's value, in the order they are written.
POOL_FLAGS: Mapping[str, str] = {
    "dtype": "--dtype",
    "quantization": "--quantization",
    "load_format": "--load-format",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
    "dcp_comm_backend": "--dcp-comm-backend",
    "dcp_kv_cache_interleave_size": "--dcp-kv-cache-interleave-size",
}

# Sizes whose default, 1, needs no flag.
SIZE_FLAGS: Mapping[str, str] = {
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "data_parallel_size": "--data-parallel-size",
    "decode_context_parallel_size": "--decode-context-parallel-size",
    "prefill_context_parallel_size": "--prefill-context-parallel-size",
}

# Read in vLLM 0.32's parser.
_ALIASES: Mapping[str, str] = {
    "-asc": "--api-server-count",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "-O": "--optimization-level",
}

# Flags that may not stand in extra_args, and the spec key to set instead.
OWNED_FLAGS: Mapping[str, str] = {
    "--model": "model",
    "--served-model-name": "served_model_name",
    "--host": "host",
    "--port": "ports.base",
    "--kv-transfer-config": "connector",
    "--kv-events-config": "kv_events",
    "--data-parallel-rpc-port": "ports.base",
    "--api-key": "PDCLUSTER_ENGINE_API_KEY in the environment (a command line is visible to every user of the host)",
    "--enforce-eager": "enforce_eager",
    "--enable-expert-parallel": "enable_expert_parallel",
    "--speculative-config": "speculative",
    **{flag: field for table in (POOL_FLAGS, SIZE_FLAGS) for field, flag in table.items()},
}

# Environment that a pool's env may not set, and why.
OWNED_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "it follows from host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "it follows from ports.base",
    "VLLM_PORT": "vLLM would number its internal ports from it and two engines would collide",
    "VLLM_API_KEY": "set PDCLUSTER_ENGINE_API_KEY in the launcher's environment, so that the proxy and the pair checks "
    "know the key too",
    "CUDA_VISIBLE_DEVICES": "set devices instead",
    "HIP_VISIBLE_DEVICES": "set devices instead",
    "ASCEND_RT_VISIBLE_DEVICES": "set devices instead",
}


def normalise(token: str) -> str:
    """Return a flag's long form with hyphens: `--max_model_len=5`, `-tp` and their like."""
    name = token.partition("=")[0]
    if name.startswith("--"):
        name = "--" + name[2:].replace("_", "-")
    if name.startswith("-O"):  # -O3 is written in one token too
        return "--optimization-level"
    head, dot, key = name.partition(".")
    return _ALIASES.get(head, head) + dot + key


def flag_names(tokens: Sequence[str]) -> Iterator[str]:
    """Yield the normalised name of each flag among `tokens`."""
    for token in tokens:
        if token.startswith("-") and not is_number(token):
            yield normalise(token)


def find_flag(tokens: Sequence[str], flag: str) -> str | None:
    """Return the value a flag has in `tokens` (the last wins, "" without a value), None where it is absent."""
    found = None
    for index, token in enumerate(tokens):
        if token.startswith("-") and normalise(token) == flag:
            following = tokens[index + 1] if index + 1 < len(tokens) else "-"
            found = token.partition("=")[2] if "=" in token else "" if following.startswith("-") else following
    return found


def is_number(token: str) -> bool:
    """Tell whether a token is a number, such as -1: then it is a value and no flag."""
    if token[:2] == "--" or not any(character.isdigit() for character in token[:3]):
        return False
    try:
        float(token)
    except ValueError:
        return False
    return True
