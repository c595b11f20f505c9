"""Model types in which positions see each other by other ways than attention: what masks drop still comes through these."""

CONVOLUTION = "convolutions"
CONVOLVED_KEYS = "keys and values that are convolved over positions"  # within attention, so nothing can confirm it
RECURRENT = "recurrent or linear-attention layers beside attention"
NEIGHBOURS = "embeddings of neighbouring tokens, put side by side"

BY_WAY = {
    RECURRENT: """
        bailing_hybrid bamba falcon_h1 glm5_next_text granitemoehybrid jamba kimi_linear lara_mini minimax
        nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma zamba zamba2
    """,
    CONVOLUTION: """
        canine convbert fastspeech2_conformer fastspeech2_conformer_with_hifigan inkling2_loop_text inkling2_text
        inkling_mm_model inkling_text lfm2_moe lfm3 nystromformer
    """,
    NEIGHBOURS: "mobilebert",
    CONVOLVED_KEYS: "zaya",
}
OTHER_WAYS = dict(sorted((name, way) for way, names in BY_WAY.items() for name in names.split()))
