"""Every provider on tiny models of every kind: a training step works, or one sentence of ours says why it cannot."""

import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

import attnreg
from attnreg.errors import InputError
from tests.helpers.provider_cases import PROVIDERS
from tests.sweep.zoo import WARNINGS, specimens

pytestmark = [pytest.mark.slow, *map(pytest.mark.filterwarnings, WARNINGS)]

# Of each family: encoders, decoders, encoder-decoders, images, sounds, several modalities, series.
TYPES = """
    albert bert big_bird canine deberta-v2 esm fnet funnel ibert longformer modernbert mpnet roformer xlnet
    blt bloom deepseek_v4 falcon gemma3n_text gpt2 gpt_neo gpt_oss jamba llama mamba mixtral
    bart bigbird_pegasus led longt5 marian prophetnet switch_transformers t5
    beit cvt deformable_detr detr levit mask2former mobilevit pvt sam segformer swin swinv2 vit yolos
    audio-spectrogram-transformer clap hubert musicgen seamless_m4t speecht5 wav2vec2 whisper
    blip-2 chameleon clip clvp cohere_compass flava idefics layoutlmv3 llava lxmert paligemma qwen2_vl tapas vilt
    autoformer decision_transformer informer patchtst perceiver time_series_transformer
"""


def loss(output, batch=None):
    """The mean square of all numbers that come out."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
    return sum(x[x.isfinite()].square().mean() for x in leaves)


CERTAIN = {"layerdrop": 1.0, "block-layerdrop": 1.0}  # drop rates


def step(model, inputs, case):
    """One training step; gives the drop rates."""
    provider = case.make(model, example_inputs=inputs, target=loss)
    with attnreg.attach(model, provider, example_inputs=inputs) as handle:
        provider.attribute(model, inputs)
        total, penalty = loss(model(**inputs)), provider.penalty()
        total = total if penalty is None else total + penalty
        if total.requires_grad:  # not if all is dropped by which parameters act
            total.backward()
        rates = handle.drop_rates()
        assert set(rates) == {site.label for site in handle.sites}
    learned = provider.learned_parameters()
    assert not learned or any(parameter.grad is not None for parameter in learned)
    gradients = [p.grad for p in (*model.parameters(), *provider.parameters()) if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    return rates


@pytest.mark.parametrize("specimen", [each for each in specimens() if each.name in TYPES.split()], ids=str)
def test_every_provider(specimen):
    torch.manual_seed(0)
    model = specimen.make().train()
    inputs = specimen.inputs(model)
    for case in PROVIDERS:
        torch.manual_seed(1)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", attnreg.injection.CoverageWarning)
            try:
                rates = step(model, inputs, case)
            except InputError:
                continue
            finally:
                attnreg.detach(model)
        if case.name in CERTAIN:
            assert rates == dict.fromkeys(rates, CERTAIN[case.name]), case
        assert all(0 <= rate <= 1 for rate in rates.values()), case
