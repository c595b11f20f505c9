"""What language models take, where it does not follow from names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.sweep.inputs import BATCH, LENGTH, TARGET, Inputs, given, mask, normal, only, whole, words

PROTEIN = given(protein_input_ids=whole(40, 90, BATCH, 9), protein_attention_mask=mask(9))

INPUTS: dict[str, Callable[[nn.Module], Inputs]] = {
    # Else they attend to everything.
    "big_bird": given(input_ids=lambda model: words(model, 18)),
    "bigbird_pegasus": given(input_ids=lambda model: words(model, 18)),
    "blt_local_decoder": only(
        inputs_embeds=lambda model: normal(BATCH, LENGTH, model.config.hidden_size),
        patch_embeds=lambda model: normal(BATCH, 3, model.config.hidden_size_global),
    ),
    "blt_local_encoder": only(input_ids=words, num_patches=3, patch_ids=torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * BATCH)),
    "decision_transformer": only(
        states=lambda model: normal(BATCH, LENGTH, model.config.state_dim),
        actions=lambda model: normal(BATCH, LENGTH, model.config.act_dim),
        returns_to_go=normal(BATCH, LENGTH, 1),
        timesteps=torch.arange(LENGTH).expand(BATCH, -1),
        attention_mask=mask(LENGTH),
    ),
    "dia": given(decoder_input_ids=whole(20, 60, BATCH, TARGET, 9)),
    "dia_decoder": given(
        input_ids=whole(20, 60, BATCH, TARGET, 9),
        attention_mask=mask(TARGET),
        encoder_hidden_states=lambda model: normal(BATCH, LENGTH, model.config.cross_hidden_size),
        encoder_attention_mask=mask(LENGTH),
    ),
    "evolla": PROTEIN,
    "EvollaModel": PROTEIN,
    # It takes one prompt at a time.
    "jev": only(input_ids=whole(40, 90, 1, LENGTH), marks=torch.tensor([[3, 6]]), num_options=torch.tensor([[2, 2]]), question_type_ids=torch.tensor([[0, 0]])),
    "luke": given(
        entity_ids=whole(1, 90, BATCH, 3), entity_attention_mask=mask(3, 1), entity_position_ids=torch.tensor([[[0, 1, -1], [2, -1, -1], [4, -1, -1]]] * BATCH)
    ),
    "lxmert": given(
        visual_feats=lambda model: normal(BATCH, 5, model.config.visual_feat_dim),
        visual_pos=lambda model: normal(BATCH, 5, model.config.visual_pos_dim),
        visual_attention_mask=mask(5),
    ),
    "perceiver": only(inputs=lambda model: normal(BATCH, LENGTH, model.config.d_model), attention_mask=mask(LENGTH)),
    "rag": given(
        context_input_ids=lambda model: words(model).repeat_interleave(2, 0),
        context_attention_mask=mask(LENGTH).repeat_interleave(2, 0),
        doc_scores=normal(BATCH, 2),
        n_docs=2,
    ),
    # In training, a whole number of chunks.
    "reformer": given(input_ids=lambda model: words(model, 8)),
    "t5gemma2_decoder": given(encoder_hidden_states=lambda model: normal(BATCH, LENGTH, model.config.hidden_size), encoder_attention_mask=mask(LENGTH)),
}  # fmt: skip
