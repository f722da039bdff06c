"""Two tiny random models for tests, from a fixed seed, with smollm2's tokenizer.

An ordinary small initialisation makes such a model emit one token for ever, whatever the prompt, and a comparison of
two answers would prove nothing. The weights are therefore widened until the greedy answer depends on every part of
the prompt; tests hold that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdcluster.models.smollm2 import quiet_transformers, save_tokenizer, source_file, write_origin
from pdcluster.models.store import Say

_SEED = 20261201
_HIDDEN = 128
_CONTEXT = 8192
_WIDE = 0.4  # standard deviation of attention and MLP weights; transformers' default is 0.02


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
    )


def build_mla(directory: Path, say: Say) -> None:
    """Two dense layers with multi-head latent attention, as DeepSeek-V2 has it."""
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
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_rope_head_dim": 32,
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
    )


def _build(directory: Path, name: str, say: Say, model_class: Any, config_class: Any, shape: dict[str, Any]) -> None:
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
        _widen(model, torch)
        model.save_pretrained(directory)
    write_origin(directory, name, source_file())


def _widen(model: Any, torch: Any) -> None:
    """Draw every matrix anew from one generator, in the order of its name, so that versions of libraries agree."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:
                continue  # the norms stay at one
            spread = 1.0 if "embed" in name or "lm_head" in name else _WIDE
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
