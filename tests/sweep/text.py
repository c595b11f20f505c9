"""What language models need besides being small, and what they take, where names do not tell."""

import torch

from tests.sweep.inputs import given, mask, normal, only, states, whole, words
from tests.sweep.shrink import BATCH, LENGTH, TARGET

# Positions of text and images: three parts, of half a head's width together.
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
MROPED = """
    cosmos3_edge_text hunyuan_vl_text hy_v4_vl_text paddleocr_vl_text qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text
    qwen2_vl_text
"""
# Where only a part of a head's width is rotated, the head is wider for three parts to fit.
HALF_MROPED = {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}}

# Blocks so small that not all of them are attended to.
SPARSE = {"block_size": 2, "num_random_blocks": 1}

CHANGES = {
    **{name: {"rope_parameters": MROPE} for name in MROPED.split()},
    **{name: {**HALF_MROPED, "head_dim": 16} for name in ["glm4v_moe_text", "glm_ocr_text"]},
    **{name: {**HALF_MROPED, "num_attention_heads": 2, "num_key_value_heads": 1} for name in ["glm4v_text", "glm_image_text"]},
    **dict.fromkeys(["big_bird", "bigbird_pegasus"], SPARSE),
    **{name: {"dropout_rate": 0.0} for name in ["t5_gemma_module", "t5gemma2_decoder", "t5gemma2_text"]},
    "bamba": {"attn_layer_indices": [1]},
    "bros": {"hidden_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE, "sliding_attention": MROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}, "moe_intermediate_size": [48, 48]},
    "esm": {"vocab_size": 99, "pad_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "funnel": {"block_sizes": [1, 1, 1], "num_decoder_layers": 1},
    "gemma3n_text": {"intermediate_size": 48, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "glm5_next_text": {"index_kpool": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_self_attends_per_block": 2},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2, "rope_parameters": MROPE,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"], "axial_pos_shape": [2, 4], "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4, "hash_seed": 1,
    },
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "step3p5": {"sliding_window": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
}  # fmt: skip

PROTEIN = given(protein_input_ids=whole(40, 90, BATCH, 9), protein_attention_mask=mask(9))

INPUTS = {
    # Else they attend to everything.
    **{name: given(input_ids=lambda model: words(model, 18)) for name in ("big_bird", "bigbird_pegasus")},
    "blt_local_decoder": only(inputs_embeds=states(), patch_embeds=states(3, "hidden_size_global")),
    "blt_local_encoder": only(input_ids=words, num_patches=3, patch_ids=torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * BATCH)),
    "decision_transformer": only(
        states=states(width="state_dim"), actions=states(width="act_dim"), returns_to_go=normal(BATCH, LENGTH, 1),
        timesteps=torch.arange(LENGTH).expand(BATCH, -1), attention_mask=mask(LENGTH),
    ),
    "dia": given(decoder_input_ids=whole(20, 60, BATCH, TARGET, 9)),
    "dia_decoder": given(
        input_ids=whole(20, 60, BATCH, TARGET, 9), attention_mask=mask(TARGET),
        encoder_hidden_states=states(width="cross_hidden_size"), encoder_attention_mask=mask(LENGTH),
    ),
    **dict.fromkeys(["evolla", "EvollaModel"], PROTEIN),
    # It takes one prompt at a time.
    "jev": only(input_ids=whole(40, 90, 1, LENGTH), marks=torch.tensor([[3, 6]]), num_options=torch.tensor([[2, 2]]), question_type_ids=torch.tensor([[0, 0]])),
    "luke": given(
        entity_ids=whole(1, 90, BATCH, 3), entity_attention_mask=mask(3, 1), entity_position_ids=torch.tensor([[[0, 1, -1], [2, -1, -1], [4, -1, -1]]] * BATCH),
    ),
    "lxmert": given(
        visual_feats=states(5, "visual_feat_dim"), visual_pos=states(5, "visual_pos_dim"),
        visual_attention_mask=mask(5),
    ),
    "perceiver": only(inputs=states(width="d_model"), attention_mask=mask(LENGTH)),
    "rag": given(
        context_input_ids=lambda model: words(model).repeat_interleave(2, 0),
        context_attention_mask=mask(LENGTH).repeat_interleave(2, 0), doc_scores=normal(BATCH, 2), n_docs=2,
    ),
    # In training, a whole number of chunks.
    "reformer": given(input_ids=lambda model: words(model, 8)),
    "t5gemma2_decoder": given(encoder_hidden_states=states(), encoder_attention_mask=mask(LENGTH)),
}  # fmt: skip
