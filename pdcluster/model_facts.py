"""What a checkpoint says of itself: its longest context, heads, attention kind and size of weights.

Read from `config.json` and the file sizes of a local directory; nothing is downloaded. A model id that isn't
on this machine has no facts: what depends on them is then not checked, and the plan says so.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster.errors import UserError

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a checkpoint's `config.json`; None means that the file doesn't say."""

    architecture: str | None
    max_model_len: int | None
    attention_heads: int | None
    kv_heads: int | None
    is_mla: bool
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What an engine loads: a directory or a model id, whether it is on this machine, and its facts if known."""

    location: str
    local: bool
    facts: ModelFacts | None


def read_facts(checkpoint: Path) -> ModelFacts:
    """Read the facts of a local checkpoint; raises `UserError` when it isn't one."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"model {checkpoint}: there is no config.json; give the directory of a checkpoint") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    architectures = config.get("architectures") or [None]
    return ModelFacts(
        architecture=architectures[0],
        max_model_len=_first_int(text, "max_position_embeddings", "n_positions", "max_seq_len", "model_max_length"),
        attention_heads=_first_int(text, "num_attention_heads", "n_head"),
        kv_heads=_first_int(text, "num_key_value_heads", "num_attention_heads", "n_head"),
        is_mla=_first_int(text, "kv_lora_rank") is not None,
        weight_bytes=max(_size(checkpoint, pattern) for pattern in _WEIGHT_PATTERNS),
    )


def locate(model: str, embedded: Collection[str]) -> Path | None:
    """Return the directory of a local checkpoint, None for an embedded name or a model id of a hub.

    A name that is none of these raises `UserError` with the nearest embedded names.
    """
    if model in embedded:
        return None
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith(("./", "../", "~")):
        raise UserError(f"model {model}: no such directory; give the directory of a checkpoint with its config.json")
    owner, slash, name = model.partition("/")
    if slash and owner and name and "/" not in name:
        return None
    close = difflib.get_close_matches(model, embedded, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(
        f"model {model}: unknown; {hint}Give an embedded model ({', '.join(sorted(embedded))}), "
        "the directory of a checkpoint, or a model id such as Qwen/Qwen3-8B"
    )


def _first_int(config: dict[str, Any], *keys: str) -> int | None:
    return next((value for key in keys if isinstance(value := config.get(key), int)), None)


def _size(directory: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in directory.glob(pattern))
