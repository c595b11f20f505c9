"""The model types that are not built, and why."""

BY_REASON = {
    "has no forward pass of its own": """
        apertus1p5_vision_tokenizer chameleon_vqgan emu3_vqgan glm_image_vqmodel qwen2_5_omni qwen3_omni_moe
    """,
    "its own forward pass fails in transformers 5.24": "llama4",
    "needs natten": "dinat",
    "needs timm": """
        edgetam edgetam_vision_model gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder pe_video
        pe_video_encoder timm_backbone timm_wrapper
    """,
    "a part of another model, with no model class of its own": """
        edgetam_mask_decoder edgetam_prompt_encoder edgetam_video_mask_decoder edgetam_video_prompt_encoder
        gemma4_unified_audio gemma4_unified_vision idefics_perciever pp_chart2table_vision sam2_mask_decoder
        sam2_prompt_encoder sam2_video_mask_decoder sam2_video_prompt_encoder sam3_geometry_encoder
        sam3_lite_text_geometry_encoder sam3_tracker_mask_decoder sam3_tracker_prompt_encoder
        sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder sam_hq_mask_decoder sam_hq_prompt_encoder
        sam_mask_decoder sam_prompt_encoder sapiens2_head vibevoice_diffusion
    """,
    "runs only in an inference session": """
        edgetam_video sam2_video sam3_tracker_video sam3_video
    """,
    "folds proteins: ten models in one, each with its own sizes and features": "esmfold2",
    "reads another model's keys and values": "gemma4_assistant gemma4_unified_assistant",
    "needs torchaudio": "higgs_audio_v2_tokenizer",
    "needs detectron2": "layoutlmv2",
    "a tokenizer for layoutlmv2": "layoutxlm",
    "a processor; its default configuration names no known model": "nougat",
    "makes sounds by a differential equation, without gradients": "qwen2_5_omni_token2wav",
}
ABSENT = dict(sorted((name, reason) for reason, names in BY_REASON.items() for name in names.split()))
