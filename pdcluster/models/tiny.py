"""Two tiny random models for tests, from a fixed seed, with smollm2's tokenizer.

An ordinary small initialisation makes such a model emit one token for ever, whatever the prompt, and a comparison of
two answers would prove nothing. Widening everything alike doesn't help either: attention then sees one token of a
thousand and is deaf to the rest. So the spread is set for each kind of matrix: attention scores of standard deviation
1 to 2, so that every token of a long prompt has its share; values and their projection wide and embeddings narrow, so
that this share outweighs the token at hand; an MLP wide enough to make a small difference a large one. Tests hold
that the greedy answer depends on every part of a prompt, and that its first choice is rarely close to the second.

Measured over 24 greedy tokens, 15 changes each: another block of 16 (tiny-mla) or 128 tokens always changes the answer,
in prompts of 640 and of 2,000 tokens. A single other token does at 640, but at 2,000 it went unseen in 1 case of 15 in
tiny and in 9 of 15 in tiny-mla: compare answers to shorter prompts where one token matters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdcluster.models.smollm2 import quiet_transformers, save_tokenizer, source_file, write_origin
from pdcluster.models.store import Say

_SEED = 20261201
_HIDDEN = 128
_CONTEXT = 8192
_SPREAD = {"embed_tokens": 0.1, "lm_head": 1.0, "mlp": 0.2}  # standard deviations; transformers' default is 0.02


def build_llama(directory: Path, say: Say) -> None:
    """Two layers, hidden 128, 4 heads on 2 KV heads, so that TP 2 works."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - heavy

    _build(
        directory,
        "tiny",
        say,
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 2, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 256},
        {"q_proj": 0.077, "k_proj": 0.11, "v_proj": 0.4, "o_proj": 0.8},
    )


def build_mla(directory: Path, say: Say) -> None:
    """Two dense layers with multi-head latent attention, as DeepSeek-V2 has it.

    vLLM 0.32's MLA backend for CPU is compiled for DeepSeek's own sizes: a latent part of 512, a rotary one of 64. The
    rotary key is zero: that build turns it differently in prefill and in decode, so that one engine alone disagrees
    with itself about the same prompt; with the latent part alone it agrees with itself and with transformers.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM  # noqa: PLC0415 - heavy

    _build(
        directory,
        "tiny-mla",
        say,
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 256,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 2,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        {"q_proj": 0.05, "kv_a_proj_with_mqa": 0.09, "kv_b_proj": 0.4, "o_proj": 0.4},
    )


def _build(
    directory: Path,
    name: str,
    say: Say,
    model_class: Any,
    config_class: Any,
    shape: dict[str, Any],
    spread: dict[str, float],
) -> None:
    with quiet_transformers():
        import torch  # noqa: PLC0415 - heavy

        say("drawing the weights")
        tokenizer = save_tokenizer(directory)
        config = config_class(
            vocab_size=len(tokenizer),
            hidden_size=_HIDDEN,
            num_hidden_layers=2,
            max_position_embeddings=_CONTEXT,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
            dtype="float32",
            **shape,
        )
        model = model_class(config).to(torch.float32)
        _draw(model, _SPREAD | spread, torch)
        model.save_pretrained(directory)
    write_origin(directory, name, source_file())


def _draw(model: Any, spread: dict[str, float], torch: Any) -> None:
    """Draw every matrix anew from one generator, in the order of its name, so that versions of libraries agree."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                continue  # the norms stay at one
            (kind,) = (kind for kind in spread if kind in name.split("."))
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread[kind])
            if kind == "kv_a_proj_with_mqa":
                weight[model.config.kv_lora_rank :] = 0  # the rotary key, see build_mla
