"""Forward passes that begin elsewhere than at the model's `forward`: each has a seed, and can be repeated."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.helpers.handwritten import Layers, plain
from tests.helpers.models import SIZES, clip


def features(layers, ids):
    """Run blocks one by one, as a method of a model does that its `forward` does not call."""
    x = layers.embed(ids)
    for block in layers.layers:
        x = block(x)
    return x


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(3))

    def forward(self, ids):
        return features(self, ids).mean(1)


def enter_text(model, ids, pixels):
    return model.get_text_features(input_ids=ids)[0]


def enter_image(model, ids, pixels):
    return model.get_image_features(pixel_values=pixels)[0]


def enter_both(model, ids, pixels):
    return enter_text(model, ids, pixels).sum() + enter_image(model, ids, pixels).sum()


@pytest.mark.parametrize("enter", [enter_text, enter_image, enter_both])
def test_a_method_of_the_model_begins_a_pass(enter):
    model, ids, pixels = clip()
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5, placement="scores"))
    first = enter(model, ids, pixels)
    seed, rates = handle.seed, handle.drop_rates()
    assert seed is not None
    assert len(rates) == (4 if enter is enter_both else 2)
    second = enter(model, ids, pixels)
    assert handle.seed != seed
    assert not torch.equal(first, second)
    for repeated, expected in ((handle.seed, second), (seed, first), (seed, first)):
        with handle.replay(repeated):
            assert torch.equal(enter(model, ids, pixels), expected)
    model(input_ids=ids, pixel_values=pixels)
    whole = handle.seed
    with handle.replay(seed):
        assert torch.equal(enter(model, ids, pixels), first)
    assert whole != seed


def test_only_a_part_is_in_training_mode():
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, ids = hf.BertModel(hf.BertConfig(**SIZES, **rates, vocab_size=30)), torch.randint(5, 30, (3, 6))
    provider = attnreg.AttributionProvider(p=0.5, q=1.0, target=lambda output, batch: output[0].sum((1, 2)))
    handle = attnreg.attach(model, attnreg.TokenDropout(0.5) & provider)
    model.eval().encoder.train()
    provider.attribute(model, {"input_ids": ids})
    first, seed = model(ids)[0], handle.seed
    assert all(handle.drop_rates().values())
    with handle.replay(seed):
        assert torch.equal(model(ids)[0], first)
    assert not torch.equal(model(ids)[0], first)
    assert handle.seed != seed


def test_probed_passes_are_no_training(patience):
    model, ids = Blocks().eval(), torch.randint(0, 20, (2, 4))
    provider = attnreg.Scheduled(attnreg.DropKey(), p=[(0, 0.5), (1, 0)], total_steps=9)
    with attnreg.attach(model, provider, example_inputs=(ids,)) as handle, handle.probing():
        for _ in range(patience + 1):  # of training passes without a step would bring a warning
            model(ids)


def test_a_part_of_a_model_has_the_masks_of_the_whole():
    config = hf.BartConfig(vocab_size=30, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
                           encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0)  # fmt: skip
    model, ids = hf.BartModel(config).train(), torch.randint(5, 30, (2, 6))
    with attnreg.attach(model, attnreg.AttentionDropout(0.5, placement="scores")) as handle:
        expected = model(input_ids=ids, decoder_input_ids=ids).encoder_last_hidden_state
        with handle.replay():
            assert torch.equal(model.get_encoder()(ids)[0], expected)
        model.get_encoder()(ids)
        assert set(handle.drop_rates()) == {"encoder.0", "encoder.1"}


def test_blocks_called_one_by_one_are_one_pass():
    model, ids = Blocks(), torch.randint(0, 20, (2, 5))
    with attnreg.attach(model, attnreg.DropKey(0.5), example_inputs=(ids,)) as handle:
        expected = features(model, ids)
        seed = handle.seed
        assert len(handle.drop_rates()) == 3
        assert not torch.equal(features(model, ids), expected)
        assert handle.seed != seed
        with handle.replay(seed):
            assert torch.equal(features(model, ids), expected)
            assert torch.equal(model(ids), expected.mean(1))  # as a whole, too
        x = model.layers[0](model.embed(ids))
        begun = handle.seed
        handle.step()
        model.layers[1](x)  # after a step, another pass
        assert handle.seed != begun
        with torch.no_grad():
            model.layers[2](x)  # not masked, so no pass of its own seed
        assert set(handle.drop_rates()) == {"encoder.1"}


def test_a_penalty_counts_the_pass_from_outside_alone():
    model, ids = Blocks(), torch.randint(0, 20, (2, 5))
    provider = attnreg.AttentionEntropy()
    with attnreg.attach(model, provider, example_inputs=(ids,)):
        features(model, ids)
        first = provider.penalty()
        features(model, ids)
        assert torch.equal(provider.penalty(), first)


def checkpointed(forward, use_reentrant, *args, **kwargs):
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=use_reentrant)


@pytest.mark.parametrize(("inside", "use_reentrant"), [(False, False), (True, False), (True, True)])
def test_checkpoints_in_a_method_repeat_its_masks(use_reentrant, inside):
    model, ids, pixels = clip()
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.5, placement="scores"))
    held = model.text_model.encoder.layers if inside else [model.text_model]
    gradients = []
    for repeat in (False, True):
        if repeat:
            for module in held:
                module.forward = functools.partial(checkpointed, module.forward, use_reentrant)
            if use_reentrant and inside:
                model.text_model.embeddings.register_forward_hook(lambda _, __, out: out.requires_grad_())
        model.zero_grad()
        torch.manual_seed(0)
        enter_text(model, ids, pixels).square().sum().backward()
        gradients.append([p.grad for p in model.text_model.encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert handle.drop_rates()


class Recurrent(nn.Module):
    """Runs one block several times, and only some of them with gradients, as truncated backpropagation does."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)

    def forward(self, ids):
        x, total = self.embed(ids), 0.0
        for learns in (False, True, False, True, True):
            with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                x = self.block(x + self.embed.weight[0])
            total = total + x
        return total


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_shared_block_that_runs_without_gradients_in_between(use_reentrant):
    model, ids, gradients = Recurrent().train(), torch.randint(0, 20, (2, 5)), []
    with attnreg.attach(model, attnreg.AttentionDropout(0.5, "scores"), example_inputs=(ids,)):
        for repeats in (False, True):
            if repeats:
                model.block.forward = functools.partial(checkpointed, model.block.forward, use_reentrant)
            torch.manual_seed(0)
            model.zero_grad()
            model(ids).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.block.parameters()])
    torch.testing.assert_close(*gradients)


class TestTransforms:
    def setup_method(self):
        self.model, self.ids = Layers(plain), torch.randint(1, 20, (3, 5))
        self.parameters = {name: p.detach() for name, p in self.model.named_parameters()}

    def loss(self, parameters, row):
        return functional_call(self.model, parameters, (row.unsqueeze(0),)).square().mean()

    def test_gradients_are_repeated(self):
        with attnreg.attach(self.model, attnreg.DropKey(0.5), example_inputs=(self.ids,)) as handle:
            expected, seed = grad(self.loss)(self.parameters, self.ids[0]), handle.seed
            again = grad(self.loss)(self.parameters, self.ids[0])
            assert any(not torch.equal(again[name], g) for name, g in expected.items())
            assert handle.seed != seed
            with handle.replay(seed):
                again = grad(self.loss)(self.parameters, self.ids[0])
            assert all(torch.equal(again[name], g) for name, g in expected.items())
            plain = {name: p.clone().requires_grad_() for name, p in self.parameters.items()}
            with handle.replay(seed):
                self.loss(plain, self.ids[0]).backward()
            used = {name: p.grad for name, p in plain.items() if p.grad is not None}
            assert all(torch.allclose(g, expected[name], atol=1e-6) for name, g in used.items())

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_elements_of_vmap(self, randomness):
        rows = self.ids[:1].expand(4, -1)
        per_sample = vmap(grad(self.loss), in_dims=(None, 0), randomness=randomness)
        with attnreg.attach(self.model, attnreg.DropKey(0.5), example_inputs=(self.ids,)) as handle:
            expected, seed = per_sample(self.parameters, rows), handle.seed
            with handle.replay(seed):
                again = per_sample(self.parameters, rows)
            assert all(torch.equal(again[name], g) for name, g in expected.items())
            distinct = len(torch.stack([g.flatten(1) for g in expected.values() if g.any()][:1])[0].unique(dim=0))
            assert (distinct > 1) == (randomness == "different")
            nested = vmap(per_sample, in_dims=(None, 0), randomness=randomness)
            found, seed = nested(self.parameters, rows.expand(2, -1, -1)), handle.seed
            with handle.replay(seed):
                again = nested(self.parameters, rows.expand(2, -1, -1))
            assert all(torch.equal(again[name], g) for name, g in found.items())

    def test_vmap_allows_no_randomness_by_default(self):
        per_sample = vmap(grad(self.loss), in_dims=(None, 0))
        with (
            attnreg.attach(self.model, attnreg.DropKey(0.5), example_inputs=(self.ids,)) as handle,
            pytest.raises(RuntimeError, match="randomness"),
        ):
            per_sample(self.parameters, self.ids)
        assert not handle._passes.latest.is_running


def test_replays_that_overlap_leave_the_fast_path_as_it_was():
    models = [nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) for _ in range(2)]
    handles = [attnreg.attach(model, attnreg.DropKey(0.5)) for model in models]
    x = torch.randn(2, 4, 8)
    seeds = [(model(x), handle.seed) for model, handle in zip(models, handles, strict=True)]
    first, second = (handle.replay(seed) for handle, (_, seed) in zip(handles, seeds, strict=True))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        assert torch.equal(models[1].eval()(x), seeds[1][0])  # still written out
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


def test_attaching_and_replaying_in_threads():
    def work(number):
        model, ids = Blocks(), torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(number))
        for _ in range(3):
            with attnreg.attach(model, attnreg.TokenDropout(0.5, 0.0), example_inputs=(ids,)) as handle:
                out, seed = model(ids), handle.seed
                for _ in range(3):
                    with handle.probing(), torch.no_grad():
                        model(ids)
                return_value = out, seed, model, handle
        return return_value

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(8)))
    assert torch.backends.mha.get_fastpath_enabled()
    for number, (out, seed, model, _) in enumerate(found):
        ids = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(number))
        with (
            attnreg.attach(model, attnreg.TokenDropout(0.5, 0.0), example_inputs=(ids,)) as handle,
            handle.replay(seed),
        ):
            assert torch.equal(model(ids), out)
