"""How many layers of attention a model has, where that follows simply from its configuration."""

from transformers.models.auto import modeling_auto

# Nothing but convolutions, recurrences or Fourier transforms.
NONE = """
    align_vision_model bit convnext convnextv2 dac dinov3_convnext efficientnet encodec falcon_mamba
    fastspeech2_conformer_hifigan flava_image_codebook fnet focalnet hgnet_v2 inkling_audio inkling_vision mamba mamba2
    mobilenet_v1 mobilenet_v2 muse_spark_audio poolformer pp_lcnet pp_lcnet_v3 pp_lcnet_v4 pp_ocrv5_mobile_det
    pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det qwen2_5_omni_bigvgan regnet resnet rt_detr_resnet rwkv
    speecht5_hifigan superpoint textnet univnet upernet uvdoc uvdoc_backbone vibevoice_acoustic_tokenizer
    vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder xlstm
"""
# Attention by hashes or correlations, only in one direction or in both although others of its kind are not, in more
# places than the layers that are counted, or in fewer.
UNSURE = """
    autoformer cpmant dory embedding_gemma2_text fastspeech2_conformer funnel informer longcat_flash minicpm_ocr_vision
    minicpmv4_6_vision minicpmv4_7_vision mllama_vision_model mra nystromformer phi4_multimodal_vision
    pp_formulanet_text reformer seamless_m4t seamless_m4t_v2 t5gemma2_text videoprism_vision_model xclip_vision_model
    xlnet yoso
"""
KINDS = ("layer_types", "layers_block_type")
ATTENDING = {"attention", "full_attention", "sliding_attention", "chunked_attention", "window_attention", "indexed_attention", "hybrid", "hybrid_sliding"}  # fmt: skip
OTHERS = {"linear_attention", "recurrent", "conv", "moe", "mlp", "mamba"}
PAIRS = (("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers"))


def expected(model_type, config):
    """The number of layers by stack; None where it is not that simple."""
    if model_type in NONE.split():
        return {}
    if model_type in UNSURE.split() or config.sub_configs:
        return None
    if config.is_encoder_decoder:
        return next(({"encoder": e, "decoder": d, "cross": d} for e, d in _numbers(config)), None)
    count = _count(config)
    stack = _stack(model_type, config)
    if stack is None or count is None:
        return None
    pooled = getattr(config, "vision_use_head", False) or getattr(config, "use_head", False)
    return {stack: count, "cross": 1} if pooled else {stack: count}


def _numbers(config):
    values = [tuple(vars(config).get(name) for name in pair) for pair in PAIRS]
    return [(e, d) for e, d in values if isinstance(e, int) and isinstance(d, int)]


def _count(config):
    kinds = next((found for name in KINDS if (found := getattr(config, name, None))), None)
    if kinds is not None:
        return sum(kind in ATTENDING for kind in kinds) if set(kinds) <= ATTENDING | OTHERS else None
    count = getattr(config, "num_hidden_layers", getattr(config, "depth", None))
    return count if isinstance(count, int) else None


def _stack(model_type, config):
    """Whether all layers attend in both directions, or only to what is before."""
    if model_type.endswith(("_vision", "_vision_model", "_vision_encoder")) or _is_among(
        model_type, "IMAGE_CLASSIFICATION"
    ):
        plain = isinstance(getattr(config, "patch_size", None), int) and not hasattr(config, "depths")
        return "encoder" if plain else None
    if _is_among(model_type, "MASKED_LM"):
        return "encoder"
    if _is_among(model_type, "CAUSAL_LM") or model_type.endswith("_text"):
        return "decoder" if getattr(config, "is_decoder", True) else None
    if _is_among(model_type, "CTC") and not hasattr(config, "encoder_config"):
        return "encoder"
    return None


def _is_among(model_type, task):
    return model_type in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
