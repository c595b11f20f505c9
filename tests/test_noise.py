"""Noise on embeddings and on hidden states, against loops."""

import math

import pytest
import torch

import attnreg
from attnreg import EmbeddingNoise, HiddenNoise, HiddenSite, functional
from attnreg.draws import Draws
from attnreg.injection.running.forward_pass import PLACES, STACKS
from tests.helpers.cases import BERT, model_case, output
from tests.helpers.commands import ran
from tests.helpers.passes import run, same, without_dropout

DROPS_NOTHING = "EmbeddingNoise adds noise; it drops nothing by design."
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


def llama():
    case = model_case("llama")
    model, batch = case.build(), {"input_ids": torch.arange(2, 20).view(3, 6), "attention_mask": VALID.long()}
    labels = batch["input_ids"].masked_fill(~VALID, -100)
    labels[0, :2], labels[1, 0] = -100, -100  # prompts of two, one and no tokens
    return model.double(), {**batch, "labels": labels}


def noise_of(handle, shape, dtype=torch.float32):
    place = PLACES.index("embeddings") * len(STACKS) + STACKS.index("decoder")
    return Draws(functional.fold_seed(handle.seed, place << 32)).uniform(shape, dtype=dtype) * 2 - 1


def test_noise_on_prompts_leaves_padding_and_responses_as_they_are():
    (model, batch), seen = llama(), []
    model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with attnreg.attach(model, EmbeddingNoise(5.0, tokens="prompt")) as handle:
        model(**batch).loss.backward()
        noise = noise_of(handle, (3, 6, 16), torch.float64)
    embedded, entered = model.get_input_embeddings()(batch["input_ids"]).detach(), seen[-1].detach()
    for b, prompt in enumerate((2, 1, 0)):
        for t in range(6):
            for c in range(16):
                size = 5.0 / math.sqrt(prompt * 16) if t < prompt else 0.0
                expected = embedded[b, t, c] + size * noise[b, t, c]
                assert math.isclose(entered[b, t, c], expected, rel_tol=1e-12)


def test_noise_on_prompts_needs_labels_that_tell_them():
    with pytest.raises(ValueError, match="Only causal language models have prompts; BertFor"):
        attnreg.attach(BERT.build(), EmbeddingNoise(tokens="prompt"))
    model, batch = llama()
    attnreg.attach(model, EmbeddingNoise(tokens="prompt"))
    with pytest.raises(ValueError, match=r"needs `labels` of shape \(3, 6\) in the model's inputs"):
        model(**{**batch, "labels": None})
    with pytest.raises(ValueError, match="the first batch must have such tokens"):
        model(**{**batch, "labels": batch["input_ids"]})
    model(**batch)
    model(**{**batch, "labels": batch["input_ids"]})


def test_a_recipe_puts_noise_on_prompts(cli):
    words = ["--task", "agreement-completion", "--epochs", 1, "--train-size", 32, "--validation-rows", 8]
    provider = ["--provider", "EmbeddingNoise(5, tokens='prompt')", "--output-dir", "out"]
    assert DROPS_NOTHING in ran(cli("recipe", "regularize", *words, *provider)).output


@pytest.mark.parametrize(("distribution", "deviation"), [("normal", 0.3), ("uniform", 0.3 / math.sqrt(3))])
def test_the_noise_of_hidden_states_has_its_distribution(distribution, deviation):
    torch.manual_seed(0)
    shape, states = (4, 50, 60), torch.randn(4, 50, 60, dtype=torch.float64)
    noise = HiddenNoise(0.3, distribution)(HiddenSite(shape=shape, dtype=torch.float64), states) - states
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(noise.numel())
    assert abs(noise.std() / deviation - 1) < 0.03
    assert distribution == "normal" or noise.abs().max() <= 0.3


def test_without_size_nothing_changes():
    model, batch = BERT.build(), BERT.batch()
    without_dropout(model)
    plain = run(model, batch)
    with attnreg.attach(model, EmbeddingNoise(0.0) & HiddenNoise(0.0)) as handle:
        assert same(run(model, batch), plain)
    assert [site.label for site in handle.sites] == ["encoder.0.embeddings", "encoder.0.input", "encoder.1.input"]


def test_in_a_llama_it_is_the_trainers_noise_on_the_embedding_module():
    """What transformers' own hook does, with our random numbers, without padding."""
    case = model_case("llama")
    model, batch = case.build(), {"input_ids": torch.arange(2, 20).view(3, 6)}
    integrations = pytest.importorskip("transformers.integrations.neftune")
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0

    def hooked(hook):
        torch.manual_seed(0)
        with embeddings.register_forward_hook(hook):
            return output(model, batch)

    def with_noise(noise):
        return hooked(lambda module, args, out: out + noise(out) * 5.0 / math.sqrt(6 * 16))

    theirs = hooked(integrations.neftune_post_forward_hook)
    torch.testing.assert_close(theirs, with_noise(lambda out: torch.zeros_like(out).uniform_(-1, 1)))
    with attnreg.attach(model, EmbeddingNoise(5.0)) as handle:
        ours = output(model, batch)
    torch.testing.assert_close(with_noise(lambda out: noise_of(handle, (3, 6, 16))), ours)


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


def test_reports_say_that_noise_drops_nothing_by_design():
    with attnreg.attach(BERT.build(), attnreg.EmbeddingNoise() & attnreg.DropHead(0.5)) as handle:
        report = handle.report()
    assert report.splitlines()[-1] == repr(report).splitlines()[-1] == DROPS_NOTHING
    assert len(report.splitlines()) == 2 + len(handle.sites)
