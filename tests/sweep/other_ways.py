"""Model types in which positions see each other by other ways than attention: what masks drop still comes through these."""

from __future__ import annotations

CONVOLUTION = "convolutions"
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
    "zamba2": RECURRENT,
}
