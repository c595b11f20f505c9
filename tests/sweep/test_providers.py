"""Every provider on tiny models of every kind: a training step works, or one sentence of ours says why it cannot."""

import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

import attnreg
from attnreg import providers
from attnreg.errors import InputError
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


def for_model(provider, *args, **options):
    return lambda model, inputs: provider.for_model(model, *args, **options, example_inputs=inputs)


def of(provider, *args, **options):
    return lambda model, inputs: provider(*args, **options)


PROVIDERS = {
    # name: how it is made, and the drop rate of each site if that is certain
    "AttentionDropout": (of(attnreg.AttentionDropout, 0.5), None),
    "AttentionDropout, scores": (of(attnreg.AttentionDropout, 0.5, placement="scores"), None),
    "AttentionLayerDrop": (of(attnreg.AttentionLayerDrop, 1.0), 1.0),
    "BernoulliScheduleProvider": (of(attnreg.BernoulliScheduleProvider, [(0, 0.6), (1, 0.2)], 10), None),
    "DropAttention": (of(attnreg.DropAttention, 0.5, window=2), None),
    "DropAttention, columns": (of(attnreg.DropAttention, 0.5, "column"), None),
    "DropHead": (of(attnreg.DropHead, 0.5), None),
    "DropKey": (of(attnreg.DropKey, 0.5), None),
    "HeadMask": (of(attnreg.HeadMask, 1), None),
    "HeadMask, importance": (of(attnreg.HeadMask, 1, "importance", target=loss), None),
    "LayerDrop": (of(attnreg.LayerDrop, 1.0), 1.0),
    "LayerDrop, half": (of(attnreg.LayerDrop, 0.5), None),
    "StructuralMask": (of(attnreg.StructuralMask, 1, keep_first=True), None),
    "TokenDropout": (of(attnreg.TokenDropout, 0.6, keep_whole=0.0), None),
    "UniDrop": (of(attnreg.UniDrop, 0.2, 0.3, 0.6, keep_whole=0.2), None),
    "AttributionProvider": (of(attnreg.AttributionProvider, 0.6, 0.6, target=loss), None),
    "AttributionProvider, integrated": (
        of(attnreg.AttributionProvider, 0.6, 0.6, "integrated_gradients", target=loss, steps=2, steps_per_forward=2),
        None,
    ),
    "AttributionProvider, attention": (of(attnreg.AttributionProvider, 0.6, 0.6, "attention"), None),
    "AdversarialAttention": (for_model(attnreg.AdversarialAttention, initial_keep=0.6), None),
    "ConcreteDropout": (for_model(attnreg.ConcreteDropout, 0.4), None),
    "ConcreteDropout, heads": (for_model(attnreg.ConcreteDropout, 0.4, per="head"), None),
    "ContextualDropout": (for_model(attnreg.ContextualDropout, 0.4), None),
    "GNetProvider": (for_model(attnreg.GNetProvider, initial_keep=0.5), None),
    "GNetProvider, shared": (
        for_model(attnreg.GNetProvider, initial_keep=0.5, share_embeddings=True, feed_forward=True),
        None,
    ),
    "LearnableBernoulli": (for_model(attnreg.LearnableBernoulli, 0.4, loss=loss), None),
}


def step(model, inputs, make):
    """One training step; gives the drop rates."""
    provider = make(model, inputs)
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
    for name, (make, certain) in PROVIDERS.items():
        torch.manual_seed(1)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", attnreg.injection.CoverageWarning)
            try:
                rates = step(model, inputs, make)
            except InputError:
                continue
            finally:
                attnreg.detach(model)
        if certain is not None:
            assert rates == dict.fromkeys(rates, certain), name
        assert all(0 <= rate <= 1 for rate in rates.values()), name


def test_none_is_missing():
    classes = {name.partition(",")[0] for name in PROVIDERS}
    combinations = {"Compose", "CrossTuning", "OnLayers"}
    assert classes | combinations == {*providers.__all__}
