"""What models of sounds and of other series take, where it does not follow from names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.sweep.inputs import (
    BATCH,
    FRAMES,
    LENGTH,
    SAMPLES,
    TARGET,
    Inputs,
    bands,
    given,
    mask,
    normal,
    only,
    spectrogram,
    whole,
)

# Their spectrograms have the time first.
TIME_FIRST = [
    "canary",
    "cohere_asr",
    "gemma4_audio",
    "lasr_ctc",
    "lasr_encoder",
    "nemo_speechlm",
    "nemotron3_5_asr",
    "nemotron3_5_transcribe_asr_audio",
    "nemotron3_5_transcribe_audio",
    "nemotron3_diarization",
    "nemotron3_diarization_audio",
    "nemotron_asr_streaming",
    "nemotron_asr_streaming_encoder",
    "parakeet_ctc",
    "parakeet_encoder",
    "parakeet_rnnt",
    "parakeet_tdt",
    "speech_to_text",
    "univnet",
    "wav2vec2-bert",
]
# Their sounds have a dimension of channels, one.
CHANNELS = [
    "dac",
    "encodec",
    "mimi",
    "mimi_encoder",
    "pe_audio",
    "pe_audio_encoder",
    "pocket_tts_audio_tokenizer",
    "pocket_tts_audio_tokenizer_encoder",
    "xcodec",
]
# Their encoders want a mask that is already spread over queries and keys.
UNMASKED = ["moss_transcribe_diarize_audio", "qwen2_audio_encoder", "voxtral_encoder"]


def frames_first(model: nn.Module) -> Tensor:
    return spectrogram(model).transpose(1, 2).contiguous()


def _past(model: nn.Module) -> Inputs:
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


def _packed(model: nn.Module) -> Inputs:
    """Two spectrograms, one after the other."""
    return {"input_features": normal(bands(model), FRAMES + 24), "feature_lens": torch.tensor([FRAMES, 24])}


# A sound of four tokens; without the noise that the model adds.
VIBES = {"input_values": normal(BATCH, 1, 4 * 16), "sample": False}
# A sound and its spectrogram, of as many frames as there are tokens.
TEN = {"input_values": normal(BATCH, 1, 10 * 320), "input_features": lambda model: normal(BATCH, 10, bands(model)), "input_features_mask": mask(10, 3)}  # fmt: skip
STACKED = {"input_features": lambda model: normal(BATCH, FRAMES, 4 * bands(model))}
SPOKEN = given(
    spectrogram_labels=lambda model: normal(BATCH, 2 * LENGTH, bands(model)),
    duration_labels=torch.full((BATCH, LENGTH), 2),
    pitch_labels=normal(BATCH, LENGTH, 1),
    energy_labels=normal(BATCH, LENGTH, 1),
)

INPUTS: dict[str, Callable[[nn.Module], Inputs]] = {
    **{name: given(input_features=frames_first) for name in TIME_FIRST},
    **{name: given(input_values=normal(BATCH, 1, SAMPLES)) for name in CHANNELS},
    **{name: given(attention_mask=None) for name in UNMASKED},
    "audio-spectrogram-transformer": only(input_values=lambda m: normal(BATCH, m.config.max_length, bands(m))),
    "autoformer": _past,
    "clap": given(input_features=lambda model: normal(BATCH, 1, FRAMES, bands(model))),
    "clap_audio_model": given(input_features=lambda model: normal(BATCH, 1, FRAMES, bands(model))),
    "csm": only(input_ids=lambda model: whole(0, 50, BATCH, LENGTH, model.config.num_codebooks), attention_mask=mask(LENGTH)),
    "dots3_note_audio_encoder": given(chunk_sample_lengths=torch.tensor([FRAMES, FRAMES // 2]) * 160),
    "fastspeech2_conformer": SPOKEN,
    "fastspeech2_conformer_hifigan": only(spectrogram=lambda m: normal(BATCH, FRAMES, m.config.model_in_dim)),
    "fastspeech2_conformer_with_hifigan": SPOKEN,
    "fun_asr_nano": given(input_features=lambda m: normal(BATCH, FRAMES, bands(m) * m.config.audio_config.num_stacked_frames)),
    "fun_asr_nano_encoder": given(input_features=lambda m: normal(BATCH, FRAMES, bands(m) * m.config.num_stacked_frames)),
    "gemma3n_audio": only(audio_mel=lambda m: normal(BATCH, FRAMES, m.config.input_feat_size), audio_mel_mask=mask(FRAMES, 8) == 0),
    "granite_speech": given(input_features=frames_first, input_features_mask=None),
    "granite_speech5_ctc": given(**STACKED),
    "granite_speech5_encoder": given(**STACKED),
    "granite_speech_encoder": only(hidden_states=lambda model: normal(BATCH, FRAMES, model.config.input_dim)),
    "granite_speech_plus": given(input_features=frames_first, input_features_mask=None),
    "granite_speech_plus_encoder": only(hidden_states=lambda model: normal(BATCH, FRAMES, model.config.input_dim)),
    "informer": _past,
    "inkling_audio": only(audio_input_ids=lambda m: whole(0, m.config.mel_vocab_size, BATCH, LENGTH, m.config.n_mel_bins)),
    "kyutai_speech_to_text": given(input_ids=lambda m: whole(0, 60, BATCH, LENGTH, m.config.num_codebooks + 1)),
    "mimi_decoder": only(latents=lambda model: normal(BATCH, model.config.hidden_size, LENGTH)),
    "moshi_depth": only(
        input_ids=lambda model: whole(0, 60, BATCH, model.config.num_codebooks), last_hidden_state=lambda model: normal(BATCH, 1, model.config.input_size)
    ),
    "moss_transcribe_diarize": given(padding_mask=torch.ones(BATCH, SAMPLES)),
    "muse_spark_audio": only(input_values=normal(BATCH, 2 * 1920)),
    "musicflamingo": given(counts={"audio": FRAMES // 4}),
    "musicgen": given(input_values=None, decoder_input_ids=lambda m: whole(0, 60, BATCH * m.config.decoder.num_codebooks, TARGET)),
    "musicgen_decoder": given(input_ids=lambda model: whole(0, 60, BATCH * model.config.num_codebooks, LENGTH), attention_mask=mask(LENGTH)),
    "musicgen_melody": given(
        input_features=lambda model: normal(BATCH, FRAMES, model.config.num_chroma),
        decoder_input_ids=lambda model: whole(0, 60, BATCH * model.config.decoder.num_codebooks, TARGET),
    ),
    "musicgen_melody_decoder": given(input_ids=lambda model: whole(0, 60, BATCH * model.config.num_codebooks, LENGTH), attention_mask=mask(LENGTH)),
    "neucodec": given(**TEN),
    "patchtsmixer": only(past_values=lambda m: normal(BATCH, m.config.context_length, m.config.num_input_channels)),
    "patchtst": only(past_values=lambda m: normal(BATCH, m.config.context_length, m.config.num_input_channels)),
    "phi4_multimodal_audio": only(hidden_states=lambda model: normal(BATCH, FRAMES, model.config.input_size), mask=mask(FRAMES, FRAMES // 4).bool()),
    "pocket_tts_audio_tokenizer_decoder": only(latents=lambda model: normal(BATCH, model.config.hidden_size, LENGTH)),
    "pop2piano": given(input_ids=None, attention_mask=mask(LENGTH), input_features=lambda model: normal(BATCH, LENGTH, model.config.d_model)),
    "qwen2_5_omni_audio_encoder": _packed,
    "qwen2_5_omni_bigvgan": only(mel_spectrogram=lambda model: normal(BATCH, model.config.mel_dim, LENGTH)),
    "qwen2_5_omni_dit": only(
        hidden_states=lambda model: normal(BATCH, 2 * LENGTH, model.config.mel_dim),
        condition_vector=lambda model: normal(BATCH, 2 * LENGTH, model.config.mel_dim),
        speaker_embedding=lambda model: normal(BATCH, 2 * LENGTH, model.config.enc_emb_dim),
        quantized_code=lambda model: whole(0, 50, BATCH, LENGTH),
        time_step=torch.tensor([0.2, 0.5]),
    ),
    "qwen2_audio": given(feature_attention_mask=mask(FRAMES, 0), counts={"audio": FRAMES // 4}),
    "qwen3_asr": given(input_features=lambda model: spectrogram(model, 100), input_features_mask=mask(100, 0)),
    "qwen3_asr_encoder": given(input_features=lambda model: spectrogram(model, 100), input_features_mask=mask(100, 25)),
    "qwen3_omni_moe_audio_encoder": _packed,
    "qwen3_omni_moe_talker_code_predictor": given(
        input_ids=None, inputs_embeds=lambda model: normal(BATCH, LENGTH, model.config.hidden_size), attention_mask=mask(LENGTH)
    ),
    "qwen3_omni_moe_talker_text": given(
        input_ids=None, inputs_embeds=lambda model: normal(BATCH, LENGTH, model.config.hidden_size), attention_mask=mask(LENGTH)
    ),
    "seamless_m4t": given(input_ids=None, input_features=frames_first),
    "seamless_m4t_v2": given(input_ids=None, input_features=frames_first),
    "speech-encoder-decoder": given(input_features=None),
    "speecht5_hifigan": only(spectrogram=lambda model: normal(BATCH, FRAMES, model.config.model_in_dim)),
    "time_series_transformer": _past,
    "timesfm": only(
        past_values=lambda model: normal(BATCH, 4 * model.config.patch_length),
        past_values_padding=lambda model: 1.0 - mask(4 * model.config.patch_length, model.config.patch_length).flip(1),
        freq=torch.zeros(BATCH, 1, dtype=torch.long),
    ),
    "timesfm2_5": only(
        past_values=lambda model: normal(BATCH, 4 * model.config.patch_length),
        past_values_padding=lambda model: 1 - mask(4 * model.config.patch_length, model.config.patch_length).flip(1),
    ),
    "univnet": only(input_features=frames_first, noise_sequence=lambda m: normal(BATCH, FRAMES, m.config.model_in_channels)),
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
