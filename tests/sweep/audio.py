"""What models of sounds and other series need besides being small, and what they take, where names do not tell."""

import torch

from tests.sweep.inputs import bands, given, mask, normal, only, spectrogram, states, whole
from tests.sweep.shrink import BATCH, FRAMES, LENGTH, SAMPLES, TARGET

SERIES = {"prediction_length": 5, "context_length": 8, "lags_sequence": [1, 2]}
# Their projectors stack some vectors to one as wide as the inner layer.
PROJECTED = {"intermediate_size": 128}
# Two halvings, so that a sound of some tokens is short.
VIBE = {"num_filters": 4, "downsampling_ratios": [4, 4], "depths": [2, 2, 2]}

CHANGES = {
    "autoformer": {**SERIES, "label_length": 4},
    "clap_audio_model": {"num_mel_bins": 32, "spec_size": 64, "window_size": 2, "num_attention_heads": [2, 4, 4, 4], "hidden_size": 256},
    "clvp_encoder": {"hidden_size": 128, "vocab_size": 256},  # 248 is a code that the model writes itself
    "dac": {"encoder_hidden_size": 4, "decoder_hidden_size": 64},
    "encodec": {"num_filters": 4},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glmasr_encoder": PROJECTED,
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
    "voxtral_encoder": PROJECTED,
    "xcodec2": {"encoder_hidden_size": 2, "quantization_dim": 64, "num_key_value_heads": 4},
}  # fmt: skip

# Their spectrograms have the time first.
TIME_FIRST = """
    canary cohere_asr gemma4_audio lasr_ctc lasr_encoder nemo_speechlm nemotron3_5_asr nemotron3_5_transcribe_asr_audio
    nemotron3_5_transcribe_audio nemotron3_diarization nemotron3_diarization_audio nemotron_asr_streaming
    nemotron_asr_streaming_encoder parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt speech_to_text wav2vec2-bert
"""
# Their sounds have a dimension of channels, one.
CHANNELS = """
    dac encodec mimi mimi_encoder omniasr omniasr_audio omniasr_ctc pe_audio pe_audio_encoder pocket_tts_audio_tokenizer
    pocket_tts_audio_tokenizer_encoder wavtokenizer wavtokenizer_encoder xcodec
"""
# Their encoders want a mask that is already spread over queries and keys.
UNMASKED = ["moss_transcribe_diarize_audio", "qwen2_audio_encoder", "voxtral_encoder"]


def frames_first(model):
    return spectrogram(model).transpose(1, 2).contiguous()


def _past(model):
    """A series' past and future; the beginning of the second sample is not known."""
    config = model.config
    length = config.context_length + max(config.lags_sequence)
    return {
        "past_values": normal(BATCH, length),
        "past_time_features": normal(BATCH, length, config.num_time_features),
        "past_observed_mask": mask(length).flip(1),
        "future_values": normal(BATCH, config.prediction_length),
        "future_time_features": normal(BATCH, config.prediction_length, config.num_time_features),
    }


def _patched(model):
    """A series in patches; the first of the second sample is not known."""
    length = model.config.patch_length
    return {"past_values": normal(BATCH, 4 * length), "past_values_padding": 1 - mask(4 * length, length).flip(1)}


def _with_frequency(model):
    made = _patched(model)
    padding = made["past_values_padding"].float()
    return {**made, "past_values_padding": padding, "freq": torch.zeros(BATCH, 1, dtype=torch.long)}


def _codes(model):
    return whole(0, 60, BATCH * model.config.decoder.num_codebooks, TARGET)


def _packed(model):
    """Two spectrograms, one after the other."""
    return {"input_features": normal(bands(model), FRAMES + 24), "feature_lens": torch.tensor([FRAMES, 24])}


# A sound of four tokens; without the noise that the model adds.
VIBES = {"input_values": normal(BATCH, 1, 4 * 16), "sample": False}
# A sound and its spectrogram, of as many frames as there are tokens.
TEN = {"input_values": normal(BATCH, 1, 10 * 320), "input_features": lambda model: normal(BATCH, 10, bands(model)), "input_features_mask": mask(10, 3)}  # fmt: skip
STACKED = {"input_features": lambda model: normal(BATCH, FRAMES, 4 * bands(model))}
SPOKEN = given(
    spectrogram_labels=lambda model: normal(BATCH, 2 * LENGTH, bands(model)), pitch_labels=normal(BATCH, LENGTH, 1),
    energy_labels=normal(BATCH, LENGTH, 1), duration_labels=torch.full((BATCH, LENGTH), 2),
)  # fmt: skip
MEL = given(input_features=lambda model: normal(BATCH, 1, FRAMES, bands(model)))
GRANITE = given(input_features=frames_first, input_features_mask=None)
GRANITE_ENCODER = only(hidden_states=states(FRAMES, "input_dim"))
EMBEDDED = given(input_ids=None, inputs_embeds=states(), attention_mask=mask(LENGTH))
CODES = given(input_ids=lambda m: whole(0, 60, BATCH * m.config.num_codebooks, LENGTH), attention_mask=mask(LENGTH))

INPUTS = {
    **{name: given(input_features=frames_first) for name in TIME_FIRST.split()},
    **{name: given(input_values=normal(BATCH, 1, SAMPLES)) for name in CHANNELS.split()},
    **{name: given(attention_mask=None) for name in UNMASKED},
    "apertus1p5": given(padding_mask=torch.ones(BATCH, SAMPLES, dtype=torch.long)),
    "audio-spectrogram-transformer": only(input_values=lambda m: normal(BATCH, m.config.max_length, bands(m))),
    **dict.fromkeys(["autoformer", "informer", "time_series_transformer"], _past),
    "clap": MEL,
    "clap_audio_model": MEL,
    "csm": only(input_ids=lambda model: whole(0, 50, BATCH, LENGTH, model.config.num_codebooks), attention_mask=mask(LENGTH)),
    "dots3_note_audio_encoder": given(chunk_sample_lengths=torch.tensor([FRAMES, FRAMES // 2]) * 160),
    "fastspeech2_conformer": SPOKEN,
    "fastspeech2_conformer_hifigan": only(spectrogram=states(FRAMES, "model_in_dim")),
    "fastspeech2_conformer_with_hifigan": SPOKEN,
    "fun_asr_nano": given(input_features=lambda m: normal(BATCH, FRAMES, bands(m) * m.config.audio_config.num_stacked_frames)),
    "fun_asr_nano_encoder": given(input_features=lambda m: normal(BATCH, FRAMES, bands(m) * m.config.num_stacked_frames)),
    "gemma3n_audio": only(audio_mel=states(FRAMES, "input_feat_size"), audio_mel_mask=mask(FRAMES, 8) == 0),
    "granite_speech": GRANITE,
    **{name: given(**STACKED) for name in ("granite_speech5_ctc", "granite_speech5_encoder")},
    "granite_speech_encoder": GRANITE_ENCODER,
    "granite_speech_plus": GRANITE,
    "granite_speech_plus_encoder": GRANITE_ENCODER,
    "inkling_audio": only(audio_input_ids=lambda m: whole(0, m.config.mel_vocab_size, BATCH, LENGTH, m.config.n_mel_bins)),
    "kyutai_speech_to_text": given(input_ids=lambda m: whole(0, 60, BATCH, LENGTH, m.config.num_codebooks + 1)),
    "mimi_decoder": only(latents=lambda model: normal(BATCH, model.config.hidden_size, LENGTH)),
    "moshi_depth": only(
        input_ids=lambda m: whole(0, 60, BATCH, m.config.num_codebooks), last_hidden_state=states(1, "input_size"),
    ),
    "moss_transcribe_diarize": given(padding_mask=torch.ones(BATCH, SAMPLES)),
    "muse_spark_audio": only(input_values=normal(BATCH, 2 * 1920)),
    "musicflamingo": given(counts={"audio": FRAMES // 4}),
    "musicgen": given(input_values=None, decoder_input_ids=_codes),
    "musicgen_decoder": CODES,
    "musicgen_melody": given(input_features=states(FRAMES, "num_chroma"), decoder_input_ids=_codes),
    "musicgen_melody_decoder": CODES,
    "neucodec": given(**TEN),
    **{name: only(past_values=lambda m: normal(BATCH, m.config.context_length, m.config.num_input_channels))
       for name in ("patchtsmixer", "patchtst")},
    "phi4_multimodal_audio": only(hidden_states=states(FRAMES, "input_size"), mask=mask(FRAMES, FRAMES // 4).bool()),
    "pocket_tts_audio_tokenizer_decoder": only(latents=lambda model: normal(BATCH, model.config.hidden_size, LENGTH)),
    "pop2piano": given(input_ids=None, attention_mask=mask(LENGTH), input_features=states(width="d_model")),
    "qwen2_5_omni_audio_encoder": _packed,
    "qwen2_5_omni_bigvgan": only(mel_spectrogram=lambda model: normal(BATCH, model.config.mel_dim, LENGTH)),
    "qwen2_5_omni_dit": only(
        hidden_states=states(2 * LENGTH, "mel_dim"), condition_vector=states(2 * LENGTH, "mel_dim"),
        speaker_embedding=states(2 * LENGTH, "enc_emb_dim"),
        quantized_code=whole(0, 50, BATCH, LENGTH), time_step=torch.tensor([0.2, 0.5]),
    ),
    "qwen2_audio": given(feature_attention_mask=mask(FRAMES, 0), counts={"audio": FRAMES // 4}),
    "qwen3_asr": given(input_features=lambda model: spectrogram(model, 100), input_features_mask=mask(100, 0)),
    "qwen3_asr_encoder": given(input_features=lambda model: spectrogram(model, 100), input_features_mask=mask(100, 25)),
    "qwen3_omni_moe_audio_encoder": _packed,
    "qwen3_omni_moe_talker_code_predictor": EMBEDDED,
    "qwen3_omni_moe_talker_text": EMBEDDED,
    **{name: given(input_ids=None, input_features=frames_first) for name in ("seamless_m4t", "seamless_m4t_v2")},
    "speech-encoder-decoder": given(input_features=None),
    "speecht5_hifigan": only(spectrogram=states(FRAMES, "model_in_dim")),
    "timesfm": _with_frequency,
    "timesfm2_5": _patched,
    "univnet": only(input_features=frames_first, noise_sequence=states(FRAMES, "model_in_channels")),
    "vibevoice": given(**VIBES, padding_mask=torch.ones(BATCH, 4 * 16)),
    "vibevoice_acoustic_tokenizer": given(**VIBES),
    "vibevoice_acoustic_tokenizer_decoder": only(hidden_states=lambda model: normal(BATCH, model.config.hidden_size, LENGTH)),
    "vibevoice_acoustic_tokenizer_encoder": only(hidden_states=VIBES["input_values"]),
    "vibevoice_asr": given(**VIBES),
    # Its sounds are added to its words, one vector to each.
    "voxtral_realtime": given(input_features=lambda model: spectrogram(model, 8 * LENGTH)),
    "voxtral_realtime_encoder": given(attention_mask=mask(FRAMES // 2, FRAMES // 8)),
    "voxtral_realtime_text": given(t_cond=lambda model: normal(1, 1, model.config.hidden_size)),
    "xcodec2": given(**TEN),
}  # fmt: skip
