"""Small configurations of every family that is known by formula, with the options that change shapes."""

from __future__ import annotations

BASE = {
    "vocab_size": 102,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT = {"vocab_size": 101, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 77}
FEW = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}


def config(model_type: str, base: dict, *without: str, **fields: object) -> dict:
    """A configuration: `base` without some fields, and with others."""
    return {"model_type": model_type, **{k: v for k, v in base.items() if k not in without}, **fields}


ODD = [
    config("llama", BASE),
    config("llama", BASE, attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=True),
    config("llama", BASE, "num_key_value_heads"),
    config("mistral", BASE),
    config("mistral", BASE, sliding_window=None, hidden_size=66, head_dim=16),
    config("mistral", BASE, "num_key_value_heads", num_attention_heads=16),
    config("qwen2", BASE),
    config("qwen2", BASE, use_sliding_window=True, max_window_layers=2, sliding_window=33),
    config("qwen2", BASE, "num_key_value_heads", num_attention_heads=32),
    config("qwen3", BASE),
    config("qwen3", BASE, head_dim=20, attention_bias=True, use_sliding_window=True, max_window_layers=1),
    config("smollm3", BASE, pad_token_id=0),
    config("smollm3", BASE, pad_token_id=0, use_sliding_window=True, sliding_window=9, no_rope_layers=[1, 0, 0, 1]),
    config("granite", BASE),
    config("olmo2", BASE),
    config("starcoder2", BASE),
    config("starcoder2", BASE, use_bias=False, sliding_window=5),
    config("nemotron", BASE),
    config("phi", BASE),
    config("gemma", BASE),
    config("gemma", BASE, "num_key_value_heads", num_attention_heads=16),
    config("gemma2", BASE, head_dim=20),
    config("gemma3_text", BASE, num_hidden_layers=8),
    config("gemma3_text", BASE, sliding_window_pattern=2, sliding_window=7),
    config("gemma3_text", BASE, layer_types=["full_attention", "sliding_attention"] * 2),
    config("phi3", BASE, pad_token_id=1),
    config("phi3", BASE, pad_token_id=1, sliding_window=5),
    config("mixtral", BASE),
    config("mixtral", BASE, num_local_experts=3, sliding_window=8),
    config("mixtral", BASE, num_experts=3),
    config("qwen3_moe", BASE, moe_intermediate_size=40),
    config("qwen3_moe", BASE, moe_intermediate_size=40, num_experts=5, mlp_only_layers=[1], decoder_sparse_step=2),
    config("qwen3_moe", BASE, moe_intermediate_size=40, num_experts=5, use_sliding_window=True),
    config("qwen2_moe", BASE, moe_intermediate_size=40, num_experts=5, shared_expert_intermediate_size=56),
    config(
        "qwen2_moe",
        BASE,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        use_sliding_window=True,
        max_window_layers=2,
        mlp_only_layers=[0],
    ),
    config("olmoe", BASE, num_experts=6),
    config("deepseek_v2", LATENT),
    config("deepseek_v2", LATENT, q_lora_rank=20, mlp_bias=True, attention_bias=True, first_k_dense_replace=0),
    config("deepseek_v3", LATENT),
    config("deepseek_v3", LATENT, q_lora_rank=20, first_k_dense_replace=9),
    config("gpt2", GPT),
    config("gpt2", GPT, n_inner=100, tie_word_embeddings=False),
    config("gpt2", FEW, max_position_embeddings=55),
    config("gpt_bigcode", GPT),
    config("gpt_bigcode", GPT, multi_query=False),
    config("gpt_neox", BASE, "num_key_value_heads"),
    config("gpt_neox", BASE, "num_key_value_heads", attention_bias=False, tie_word_embeddings=True),
    config("opt", FEW, ffn_dim=99),
    config("opt", FEW, ffn_dim=99, word_embed_proj_dim=40, do_layer_norm_before=False, enable_bias=False),
    config("opt", FEW, ffn_dim=99, layer_norm_elementwise_affine=False),
    config("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101}),
    config("bloom", FEW),
    config("falcon", FEW),
    config("falcon", FEW, new_decoder_architecture=True, num_kv_heads=2),
    config("falcon", FEW, multi_query=False, bias=True, alibi=True, parallel_attn=False),
    config("falcon", FEW, multi_query=False, num_kv_heads=2, num_ln_in_parallel_attn=2),
    config("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 101, "expansion_ratio": 3}),
]
"""Every family, every option that changes names, shapes or masks, odd sizes, and fields left to their defaults."""
