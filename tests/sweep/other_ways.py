"""Model types in which positions see each other by other ways than attention: what masks drop still comes through these."""

from __future__ import annotations

CONVOLUTION = "convolutions"
CONVOLVED_KEYS = "keys and values that are convolved over positions"  # within attention, so nothing can confirm it
RECURRENT = "recurrent or linear-attention layers beside attention"
NEIGHBOURS = "embeddings of neighbouring tokens, put side by side"

OTHER_WAYS = {
    "bailing_hybrid": RECURRENT,
    "bamba": RECURRENT,
    "canine": CONVOLUTION,
    "convbert": CONVOLUTION,
    "falcon_h1": RECURRENT,
    "fastspeech2_conformer": CONVOLUTION,
    "fastspeech2_conformer_with_hifigan": CONVOLUTION,
    "glm5_next_text": RECURRENT,
    "granitemoehybrid": RECURRENT,
    "inkling2_text": CONVOLUTION,
    "inkling_mm_model": CONVOLUTION,
    "inkling_text": CONVOLUTION,
    "jamba": RECURRENT,
    "kimi_linear": RECURRENT,
    "lfm2_moe": CONVOLUTION,
    "lfm3": CONVOLUTION,
    "minimax": RECURRENT,
    "mobilebert": NEIGHBOURS,
    "nemotron_h": RECURRENT,
    "nystromformer": CONVOLUTION,
    "olmo_hybrid": RECURRENT,
    "qwen3_5_moe_text": RECURRENT,
    "qwen3_5_text": RECURRENT,
    "qwen3_next": RECURRENT,
    "qwen4_exp_text": RECURRENT,
    "recurrent_gemma": RECURRENT,
    "zamba": RECURRENT,
    "zamba2": RECURRENT,
    "zaya": CONVOLVED_KEYS,
}
