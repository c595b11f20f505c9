"""``where="residual"``: what residual connections add, against hooks on the modules that compute it."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg import functional
from attnreg.draws import Draws
from attnreg.injection.running.forward_pass import PLACES, STACKS
from tests.helpers.cases import MODELS, model_case, output
from tests.helpers.passes import models, run, same, without_dropout, wrap_in_checkpoints

# The last modules of what each block adds to its hidden states.
ADDED = {
    "bert": ["attention.output.dropout", "output.dropout"],
    "distilbert": ["attention", "ffn"],
    "gpt2": ["attn", "mlp"],
    "llama": ["self_attn", "mlp"],
    "t5": ["layer.0.dropout", "layer.1.dropout", "layer.2.dropout"],
    "torch-encoder": ["dropout1", "dropout2"],
}
LIMA = "Scheduled(HiddenDropout(where='residual'), over='depth', p=[(0, 0), (1, 0.3)])"


class Shrink(attnreg.HiddenProvider):
    where = "residual"

    def forward(self, site, states):
        return states / (site.layer + 2)


def changed(how, module, args, out):
    return how(out) if isinstance(out, torch.Tensor) else (how(out[0]), *out[1:])


def in_float64(case):
    model, batch = case.build(), case.batch()
    without_dropout(model)
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.parametrize("case", [case for case in MODELS if case.name in ADDED], ids=str)
def test_it_changes_what_each_residual_connection_adds(case):
    model, batch = in_float64(case)
    plain = run(model, batch)
    with attnreg.attach(model, Shrink()) as handle:
        got = run(model, batch)
    assert {site.label for site in handle.sites} == {f"{s}.{i}.residual" for s in case.stacks for i in (0, 1)} - {
        f"cross.{i}.residual" for i in (0, 1)
    }
    for number, block in enumerate(case.blocks(model)):
        for name in ADDED[case.name]:
            if name in dict(block.named_modules()):  # T5's encoder has two
                hook = functools.partial(changed, lambda states, layer=number % 2: states / (layer + 2))
                block.get_submodule(name).register_forward_hook(hook)
    expected = run(model, batch)
    assert not torch.allclose(got[0], plain[0])
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-12)
    for ours, theirs in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_residual_dropout_that_rises_with_depth_is_one_line():
    """LIMA: p from 0 at the first layer to 0.3 at the last."""
    model, batch = in_float64(model_case("llama"))
    with attnreg.attach(model, attnreg.parse_provider(LIMA)) as handle:
        got = output(model, batch)
    for layer, block in enumerate(model.model.layers):
        p = 0.3 * layer / (len(model.model.layers) - 1)
        place = PLACES.index("residual") * len(STACKS) + STACKS.index("decoder")
        draws = Draws(functional.fold_seed(handle.seed, (place << 32) + layer))  # two draws of one source
        for name in ADDED["llama"]:
            how = lambda states, p=p, draws=draws: states * draws.keep(states.shape, p) / (1 - p)  # noqa: E731
            block.get_submodule(name).register_forward_hook(functools.partial(changed, how))
    torch.testing.assert_close(got, output(model, batch), rtol=0, atol=1e-12)
    assert 0.2 < handle.drop_rates()["decoder.1.residual"] < 0.4
    assert handle.drop_rates()["decoder.0.residual"] == 0


@models
def test_every_model_drops_the_same_when_checkpointing_repeats_it(case):
    model, batch = case.build(), case.batch()
    text = f"{LIMA} & Scheduled(LayerDrop(), over='depth', growth=9, p=[(0, 0.3), (1, 0.6)]) & HiddenDropout(0.1)"
    with attnreg.attach(model, attnreg.parse_provider(text, total_steps=1)) as handle:
        handle.step()
        first, second = (run(model, batch, seed) for seed in (3, 7))
        assert not same(first, second)
        wrap_in_checkpoints(case, model)
        assert same(run(model, batch, 3), first)
        assert same(run(model, batch, 7), second)


class Own(nn.TransformerEncoderLayer):
    def __init__(self, how):
        super().__init__(8, 2, 16, batch_first=True, dropout=0.0)
        self.how = how

    def forward(self, x, *args, **kwargs):
        if self.how == "inside":
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x + 1.0 if self.how == "before" else x) * (2.0 if self.how == "after" else 1.0)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("before", "do not lead from its input to its output"),
        ("after", "do not lead from its input to its output"),
        ("inside", "run in a checkpoint inside of it"),
    ],
)
def test_a_block_whose_connections_cannot_be_followed_is_refused(how, says):
    model = nn.Sequential(Own(how), Own(how))
    example = {"input": torch.randn(3, 4, 8)}
    attnreg.attach(model, attnreg.HiddenDropout(0.5, where="residual"), example_inputs=example)
    with pytest.raises(ValueError, match=rf"The residual connections of 0 {says}: use `where='output'`"):
        model(**example)


def test_they_have_no_attribution():
    with pytest.raises(ValueError, match="has several residual connections, without attribution"):
        attnreg.HiddenAttributionDropout(where="residual")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled_code_drops_the_same(name):
    model, batch = in_float64(model_case(name))
    with attnreg.attach(model, attnreg.parse_provider(LIMA)) as handle:
        torch._dynamo.reset()
        got = output(torch.compile(model, backend="aot_eager", fullgraph=True), batch)
        with handle.replay():
            torch.testing.assert_close(output(model, batch), got)
