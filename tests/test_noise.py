"""Noise on embeddings and on hidden states, against loops."""

import math

import pytest
import torch

import attnreg
from attnreg import EmbeddingNoise, HiddenNoise, HiddenSite, functional
from attnreg.draws import Draws
from attnreg.injection.running.forward_pass import PLACES, STACKS
from tests.cases import MODELS, output
from tests.commands import ran
from tests.test_contract import run, same, without_dropout

VALID = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [False] * 5 + [True]])


def test_the_noise_of_embeddings_is_that_of_neftune_without_padding():
    states = torch.randn(3, 6, 50, dtype=torch.float64)
    site = HiddenSite(where="embeddings", shape=(3, 6, 50), valid=VALID, dtype=torch.float64)
    torch.manual_seed(0)
    out = EmbeddingNoise(5.0)(site, states)
    torch.manual_seed(0)
    uniform = site.uniform(dtype=torch.float64) * 2 - 1
    for b, length in enumerate((6, 4, 1)):
        for t in range(6):
            for c in range(50):
                expected = states[b, t, c] + 5.0 / math.sqrt(length * 50) * uniform[b, t, c]
                assert math.isclose(out[b, t, c], expected, rel_tol=1e-12)


@pytest.mark.parametrize(("distribution", "deviation"), [("normal", 0.3), ("uniform", 0.3 / math.sqrt(3))])
def test_the_noise_of_hidden_states_has_its_distribution(distribution, deviation):
    torch.manual_seed(0)
    shape, states = (4, 50, 60), torch.randn(4, 50, 60, dtype=torch.float64)
    noise = HiddenNoise(0.3, distribution)(HiddenSite(shape=shape, dtype=torch.float64), states) - states
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(noise.numel())
    assert abs(noise.std() / deviation - 1) < 0.03
    assert distribution == "normal" or noise.abs().max() <= 0.3


def test_without_size_nothing_changes():
    model, batch = MODELS[0].build(), MODELS[0].batch()
    without_dropout(model)
    plain = run(model, batch)
    with attnreg.attach(model, EmbeddingNoise(0.0) & HiddenNoise(0.0)) as handle:
        assert same(run(model, batch), plain)
    assert [site.label for site in handle.sites] == ["encoder.0.embeddings", "encoder.0.input", "encoder.1.input"]


def test_in_a_llama_it_is_the_trainers_noise_on_the_embedding_module():
    """What transformers' own hook does, with our random numbers, without padding."""
    case = next(case for case in MODELS if case.name == "llama")
    model, batch = case.build(), {"input_ids": torch.arange(2, 20).view(3, 6)}
    integrations = pytest.importorskip("transformers.integrations.neftune")
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    hook = embeddings.register_forward_hook(integrations.neftune_post_forward_hook)
    torch.manual_seed(0)
    theirs = output(model, batch)
    hook.remove()
    torch.manual_seed(0)
    hook = embeddings.register_forward_hook(
        lambda module, args, out: out + torch.zeros_like(out).uniform_(-1, 1) * 5.0 / math.sqrt(6 * 16)
    )
    expected = output(model, batch)
    hook.remove()
    torch.testing.assert_close(theirs, expected)  # what their hook does
    with attnreg.attach(model, EmbeddingNoise(5.0)) as handle:
        ours = output(model, batch)
    place = PLACES.index("embeddings") * len(STACKS) + STACKS.index("decoder")
    noise = Draws(functional.fold_seed(handle.seed, place << 32)).uniform((3, 6, 16)) * 2 - 1
    hook = embeddings.register_forward_hook(lambda module, args, out: out + noise * 5.0 / math.sqrt(6 * 16))
    torch.testing.assert_close(output(model, batch), ours)
    hook.remove()


def test_noise_that_rounding_removes_is_warned_of_once():
    states = torch.randn(2, 3, 50)
    for dtype in (torch.bfloat16, torch.float16):
        site, provider = HiddenSite(shape=(2, 3, 50), dtype=dtype), HiddenNoise()
        with pytest.warns(UserWarning, match=rf"9\d%|100% of the noise of HiddenNoise is lost, .* {dtype}"):
            provider(site, states.to(dtype))
        provider(site, states.to(dtype))
        HiddenNoise(0.1)(site, states.to(dtype))
        EmbeddingNoise()(HiddenSite(where="embeddings", shape=(2, 3, 50), dtype=dtype), states.to(dtype))
    HiddenNoise()(HiddenSite(shape=(2, 3, 50)), states)


def test_reports_say_that_noise_drops_nothing_by_design(cli):
    with attnreg.attach(MODELS[0].build(), attnreg.EmbeddingNoise() & attnreg.DropHead(0.5)) as handle:
        report = handle.report()
    said = "EmbeddingNoise adds noise; it drops nothing by design."
    assert report.splitlines()[-1] == repr(report).splitlines()[-1] == said
    assert f"</table><p>{said}</p>" in report._repr_html_()
    assert report._repr_html_().count("<tr>") == 1 + len(handle.sites)
    words = ["--epochs", 1, "--train-size", 64, "--output-dir", "out"]
    assert said in ran(cli("recipe", "regularize", "--provider", "EmbeddingNoise(5)", *words)).output
