"""A tiny config for every model of mlx-lm: what all share, and what differs.

Fields that a model does not know are dropped by its own `from_dict`, so the shared part holds those
of all models. Windows are of 16 tokens, which a test's prompt exceeds, and layers are as few as
show every kind that a model has.
"""

from typing import Any

VOCABULARY = 128
WINDOW = 16

SHARED: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    # MLA.
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Windows.
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
}

SLIDING, FULL = "sliding_attention", "full_attention"
FOUR = {"num_hidden_layers": 4}
WINDOWS = {**FOUR, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
ALL_HEADS = {"num_key_value_heads": 4}
# Keys and values of MLA that are cached as they are attended to, wide enough to be packed.
EXPANDED = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPES = {"rope_parameters": {SLIDING: ROPE, FULL: ROPE}}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
GPT2 = {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 4096, "n_ctx": 4096, "n_inner": 64}
DELTA = {
    **FOUR,
    "full_attention_interval": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
MINICPM = {"dim_model_base": 128, "scale_depth": 1.4, "scale_emb": 1.0}
MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_conv_bias": True,
}
MAMBA_D = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_proj_bias": False,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
}
LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
LFM2 = {
    **FOUR,
    "layer_types": ["conv", FULL, "conv", FULL],
    "full_attn_idxs": [1, 3],
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "use_expert_bias": True,
    "num_dense_layers": 1,
}
KIMI_DELTA = {
    **FOUR,
    **ALL_HEADS,
    "head_dim": 32,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "model_max_length": 4096,
    "num_experts_per_token": 2,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}


def text(**changes: Any) -> dict[str, Any]:
    """Of a model that has its language model's config inside its own."""
    return {"text_config": changes}


DIFFERENT: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 128,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "afmoe": {**WINDOWS, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {**FOUR, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {**FOUR, **ALL_HEADS, "layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_linear": {**FOUR, "layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {**FOUR, **ALL_HEADS, "layer_group_size": 2, "n_group": 2, "head_dim": 32},
    "cohere2": FOUR,
    "dbrx": {
        "d_model": 128,
        "n_layers": 2,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {**EXPANDED, "rope_scaling": YARN, "topk_method": "gready"},
    "deepseek_v3": ALL_HEADS,
    "deepseek_v32": {**INDEXER, **ALL_HEADS},
    "deepseek_v41": {
        **FOUR,
        **INDEXER,
        "head_dim": 32,
        "index_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": [0, 4, 1, 4],
        "kv_source_layer_ids": [1, 2, 3],
        "index_source_layer_ids": [1, 2, 3],
        "hc_mult": 2,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone": {"num_layers": 2},
    "exaone4": {**FOUR, "sliding_window_pattern": "LG"},
    "exaone_moe": {**WINDOWS, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {**MAMBA_D, "mamba_d_ssm": 64},
    "gear": {**FOUR, "layer_types": [SLIDING, FULL, "conv_mixer", FULL]},
    "gemma3": text(**FOUR),
    "gemma3_text": FOUR,
    "gemma3n": text(
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=[SLIDING, FULL] * 3,
        activation_sparsity_pattern=[0.0] * 6,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY,
        rope_local_base_freq=10000.0,
        final_logit_softcapping=30.0,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    ),
    "gemma4": text(**GEMMA4),
    "gemma4_text": GEMMA4,
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": ALL_HEADS,
    "glm_moe_dsa": {
        **INDEXER,
        **ALL_HEADS,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": ROPE,
    },
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": FOUR,
    "gptj": {**GPT2, "rotary_dim": 16},
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitemoehybrid": {
        **GRANITE,
        **MAMBA_D,
        **FOUR,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 64,
    },
    "hunyuan": {
        **FOUR,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        **FOUR,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "kimi_k25": text(**ALL_HEADS),
    "kimi_k3": text(**KIMI_DELTA),
    "kimi_linear": KIMI_DELTA,
    "kimi_vl": text(**ALL_HEADS),
    "laguna": {**WINDOWS, **ROPES},
    "lfm2": LFM2,
    "lfm2-vl": text(**LFM2),
    "lfm2_moe": LFM2,
    "lille-130m": {"block_size": 4096, "n_embd": 128, "n_head": 4, "n_kv_heads": 2, "n_layer": 2},
    "llama": WINDOWS,
    "llama4": text(
        **FOUR,
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=64,
        use_qk_norm=True,
        num_experts_per_tok=1,
    ),
    "llama4_text": {
        **FOUR,
        "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": {
        **LONGCAT,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba": {"state_size": 16, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 8},
    "mamba2": {
        **MAMBA,
        "num_heads": 8,
        "state_size": 16,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 8,
    },
    "mellum": {**WINDOWS, **ROPES},
    "mimo_v2_flash": {
        **FOUR,
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-6,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "v_head_dim": 32,
    },
    "minicpm": MINICPM,
    "minicpm3": {
        **MINICPM,
        **ALL_HEADS,
        **EXPANDED,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "original_max_position_embeddings": 4096,
        },
    },
    "minimax": {"shared_intermediate_size": 64, "rotary_dim": 16},
    "minimax_m3_vl": text(
        dense_intermediate_size=64,
        shared_intermediate_size=64,
        moe_layer_freq=[0, 1],
        sparse_attention_freq=[0, 1],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=4,
    ),
    "ministral3": {
        **WINDOWS,
        "rope_parameters": {
            **ROPE,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
        },
    },
    "mistral3": text(model_type="llama"),
    "mistral4": {
        **ALL_HEADS,
        "rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
    },
    "muse_glimmer": WINDOWS,
    "muse_spark": text(
        **WINDOWS,
        rope_parameters=ROPE,
        layer_rope_theta=[10000.0, 0.0, 10000.0, 0.0],
        post_norm_eps=1e-6,
        final_logit_softcapping=20.0,
        output_multiplier=1.0,
        moe_hidden_size=32,
        num_shared_experts=0,
    ),
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "nemotron_h": {
        **MAMBA,
        "hybrid_override_pattern": ["M", "*", "-", "E", "*"],
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo": {
        "d_model": 128,
        "n_layers": 2,
        "mlp_hidden_size": 128,
        "n_heads": 4,
        "embedding_size": VOCABULARY,
    },
    "olmo3": WINDOWS,
    "olmo_hybrid": {
        **DELTA,
        "layer_types": ["linear_attention", FULL] * 2,
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 1],
        "ffn_multipliers": [1.0, 1.0],
    },
    # Every other layer attends block-sparsely by hand; the others ask mlx-lm to.
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 64,
        "gegelu_limit": 20.0,
        "mup_embedding_multiplier": 1.0,
        "mup_width_multiplier": 1.0,
        "blocksparse_block_size": 32,
    },
    "phimoe": {
        "rope_scaling": {
            "short_factor": [1.0] * 16,
            "long_factor": [1.0] * 16,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        }
    },
    "phixtral": {
        "num_vocab": VOCABULARY,
        "model_dim": 128,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 16,
    },
    "pixtral": text(model_type="llama"),
    "plamo": {"n_shared_head": 2},
    "plamo2": {**FOUR, "hidden_size_per_head": 32, "mamba_num_heads": 4, "mamba_d_state": 8},
    "plamo3": {**FOUR, "window_size": WINDOW},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
        **text(**DELTA),
    },
    "qwen": {"kv_channels": 32},
    "qwen2_vl": text(model_type="qwen2"),
    "qwen3_5": text(**DELTA),
    "qwen3_5_moe": text(**DELTA),
    "qwen3_next": DELTA,
    "qwen3_vl": text(model_type="qwen3"),
    "qwen3_vl_moe": text(model_type="qwen3_moe"),
    "recurrent_gemma": {
        **FOUR,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "spark2_5": {**WINDOWS, **ROPES},
    "stablelm": {"use_qkv_bias": False},
    "step3p5": {
        **WINDOWS,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
    },
    "youtu_llm": {**ALL_HEADS, **EXPANDED},
}


#: What models are called in an mlx-lm before the newest.
OLD_NAMES = {"muse_spark_open": "muse_spark"}


def config_of(module: str) -> dict[str, Any]:
    """The tiny config of a module of `mlx_lm.models`."""
    changes = DIFFERENT.get(OLD_NAMES.get(module, module), {})
    config = {"model_type": module, **SHARED, **changes}
    if "text_config" in changes:
        config["text_config"] = {"model_type": module, **SHARED, **changes["text_config"]}
    return config
