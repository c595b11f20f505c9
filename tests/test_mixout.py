"""Mixout against its formula, and the model as it was."""

import copy
import math

import pytest
import torch
import transformers as hf
from torch import nn

from attnreg.errors import InputError
from attnreg.training import Mixout, RDropLoss
from attnreg.training.mixout import mix
from tests.helpers.method_cases import bert, moved, sgd
from tests.helpers.objectives import BATCH


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9])
def test_mixing_is_the_formula_unit_by_unit_and_keeps_the_mean(p):
    torch.manual_seed(0)
    w, u = (torch.randn(3, 5, dtype=torch.float64) for _ in range(2))
    replaced = torch.rand(5) < 0.5
    got = mix(w, u, replaced, p)
    for o in range(3):
        for i in range(5):
            m = float(replaced[i])
            expected = (m * u[o, i] + (1 - m) * w[o, i] - p * u[o, i]) / (1 - p)
            assert got[o, i].item() == pytest.approx(expected.item(), abs=1e-12)
    mean = p * mix(w, u, torch.tensor(True), p) + (1 - p) * mix(w, u, torch.tensor(False), p)
    torch.testing.assert_close(mean, w)
    assert torch.autograd.gradcheck(lambda w: mix(w, u, replaced, p), (w.requires_grad_(),))


def test_a_share_p_of_the_inputs_of_each_layer_has_its_pretrained_weights():
    torch.manual_seed(0)
    model = bert(dropout=0.0)
    method = Mixout(model, sgd(model), p=0.4)
    layer = model.bert.encoder.layer[0].intermediate.dense
    pretrained = layer.weight.detach().clone()
    moved(model)
    model.train()
    eye = torch.eye(layer.in_features, dtype=torch.float64)
    replaced = 0
    for _ in range(300):
        mixed = (layer(eye) - layer.bias).T.detach()
        is_u = torch.isclose(mixed, pretrained).all(0)  # (u - p u) / (1 - p)
        is_w = torch.isclose(mixed, (layer.weight - 0.4 * pretrained) / 0.6).all(0)
        assert (is_u ^ is_w).all()  # whole columns: all that goes out of one neuron
        replaced += int(is_u.sum())
    n = 300 * layer.in_features
    assert abs(replaced / n - 0.4) <= 5 * math.sqrt(0.4 * 0.6 / n)
    assert set(method.pretrained) == {
        name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "classifier"
    }


def test_while_nothing_has_moved_it_is_the_plain_model():
    model = bert(dropout=0.0)
    plain = model.train()(**BATCH).logits
    Mixout(model, sgd(model), p=0.7)
    torch.testing.assert_close(model(**BATCH).logits, plain)


def test_a_step_changes_the_true_weights_and_not_the_pretrained_ones():
    model = bert(dropout=0.0)
    method = Mixout(model, sgd(model), p=0.5)
    pretrained = copy.deepcopy(method.pretrained)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        method.step(BATCH)
    for name, weight in pretrained.items():
        assert torch.equal(method.pretrained[name], weight)
        assert torch.equal(before[f"{name}.weight"], weight)
        assert not torch.equal(model.get_submodule(name).weight, weight)


def test_a_model_with_nothing_to_mix_is_refused():
    config = hf.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)
    model = hf.GPT2ForSequenceClassification(config)
    with pytest.raises(ValueError, match=r"GPT2Model has no trainable nn\.Linear layer"):
        Mixout(model, sgd(model))
    model = bert()
    Mixout(model, sgd(model))
    with pytest.raises(ValueError, match="Mixout cannot replace the forward of "):
        Mixout(model, sgd(model))


def test_passes_of_an_objective_do_not_share_masks():
    """They would, in micro-batches: so that is refused."""
    model = bert(dropout=0.0)
    with pytest.raises(InputError, match="an objective of several passes does not fit: use `micro_batches=1`"):
        Mixout(model, sgd(model), objective=RDropLoss(), micro_batches=2)
    logits = []

    def kept(forward, batch):
        logits.extend(forward.predict(batch)[1] for _ in range(2))
        return logits[0].sum()

    method = Mixout(model, sgd(model), p=0.5, objective=kept)
    moved(model)
    method.step(BATCH)
    assert not torch.equal(*logits)


def test_adapters_are_refused():
    model = bert()
    model.peft_config = {}
    with pytest.raises(InputError, match="which adapters do not train: fine-tune the model itself"):
        Mixout(model, sgd(model))
