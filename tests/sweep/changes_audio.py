"""What the configurations of models of sounds and of other series need besides being small."""

from __future__ import annotations

from typing import Any

SERIES = {"prediction_length": 5, "context_length": 8, "lags_sequence": [1, 2]}
# Their projectors stack some vectors to one as wide as the inner layer.
STACKED = {"intermediate_size": 128}

# Two halvings, so that a sound of some tokens is short.
VIBE = {"num_filters": 4, "downsampling_ratios": [4, 4], "depths": [2, 2, 2]}

CHANGES: dict[str, dict[str, Any]] = {
    "autoformer": {**SERIES, "label_length": 4},
    "clap_audio_model": {"num_mel_bins": 32, "spec_size": 64, "window_size": 2, "num_attention_heads": [2, 4, 4, 4], "hidden_size": 256},
    "clvp_encoder": {"hidden_size": 128, "vocab_size": 256},  # 248 is a code that the model writes itself
    "dac": {"encoder_hidden_size": 4, "decoder_hidden_size": 64},
    "encodec": {"num_filters": 4},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glmasr_encoder": STACKED,
    "granite_speech": {"window_size": 15},
    "granite_speech_plus": {"window_size": 15},
    "informer": SERIES,
    "lasr_encoder": {"conv_kernel_size": 5},
    "mimi": {"num_filters": 4},
    "mimi_decoder": {"num_filters": 4},
    "mimi_encoder": {"num_filters": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4, "patch_sizes": [16, 6, 5, 4]},
    "neucodec": {"encoder_hidden_size": 2, "quantization_dim": 64, "num_key_value_heads": 4},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 64},
    "qwen2_5_omni_dit": {"enc_channels": [32, 32, 32, 32, 96]},
    "time_series_transformer": SERIES,
    "univnet": {"model_in_channels": 8, "model_hidden_channels": 4, "kernel_predictor_hidden_channels": 8},
    "vibevoice": {"audio_token_id": 10},
    "vibevoice_acoustic_tokenizer": VIBE,
    "vibevoice_acoustic_tokenizer_decoder": VIBE,
    "vibevoice_acoustic_tokenizer_encoder": VIBE,
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "voxtral": {"audio_token_id": 10},
    "voxtral_encoder": STACKED,
    "xcodec2": {"encoder_hidden_size": 2, "quantization_dim": 64, "num_key_value_heads": 4},
}  # fmt: skip
