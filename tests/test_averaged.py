"""Averages of weights, against sums over all networks that training passed through."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import attnreg
from attnreg.errors import InputError
from attnreg.training import AttackerDefender, Averaged, FineTuning, Rounds
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.method_cases import adamw, batches, bert, sgd, weights
from tests.helpers.recipe_cases import evaluated_again

RATES = (0.05, 0.1, 0.3)


@pytest.mark.parametrize(("ema", "wise"), [(0.0, 1.0), (0.9, 1.0), (0.0, 0.3), (0.5, 0.75), (0.0, 0.0)])
def test_the_average_is_that_of_all_networks_so_far(ema, wise):
    model = bert(dropout=0.0)
    method = Averaged(FineTuning(model, sgd(model), attnreg.AttentionDropout(0.2)), ema=ema, wise=wise)
    passed = [weights(model)]
    for batch in batches(4):
        method.step(batch)
        passed.append(weights(model))
        trained = passed[1:]
        last = len(trained) - 1
        shares = [(1 - ema) * ema ** (last - t) if t else ema**last for t in range(len(trained))]
        average = sum(share * each for share, each in zip(shares, trained, strict=True))
        torch.testing.assert_close(weights(method.model), (1 - wise) * passed[0] + wise * average)
    assert not attnreg.is_attached(method.model)
    assert attnreg.is_attached(model)
    assert method.networks == {"model": method.model}


def test_a_soup_is_the_mean_of_networks_trained_apart():
    """With three learning rates, and mixed with the weights before."""
    networks = [bert(dropout=0.0) for _ in range(3)]
    start = weights(networks[0])

    def trainer(model, rate):
        return FineTuning(model, torch.optim.SGD(model.parameters(), lr=rate))

    method = Averaged(list(map(trainer, networks, RATES)), wise=0.6)
    for batch in batches(3):
        result = method.step(batch)
    trained = []
    for rate in RATES:
        model = bert(dropout=0.0)
        alone = trainer(model, rate)
        losses = [alone.step(batch).loss for batch in batches(3)]
        trained.append((weights(model), losses[-1]))
    mean, loss = (sum(each) / 3 for each in zip(*trained, strict=True))
    torch.testing.assert_close(weights(method.model), 0.4 * start + 0.6 * mean)
    torch.testing.assert_close(result.loss, loss)
    assert (trained[0][0] - trained[2][0]).abs().max() > 1e-3
    assert len(method.learners) == 3
    other = bert(dropout=0.0)
    other.classifier.bias.data += 1
    with pytest.raises(InputError, match=r"same weights before training.* got others in method 2"):
        Averaged([FineTuning(model, sgd(model)) for model in (bert(dropout=0.0), other)])


def test_what_has_no_mean_is_refused(cli):
    with pytest.raises(InputError, match="with separate networks"):
        Averaged([])
    model = bert(dropout=0.0)
    method = FineTuning(model, sgd(model))
    with pytest.raises(InputError, match="with separate networks"):
        Averaged([method, method])
    ran(cli("recipe", "finetune", "--train-size", 8, "--epochs", 1, "--device", "cpu", "--output-dir", "first"))
    options = ["--model", "first/model", "--lora-rank", 2, "--lora-targets", "query", "--train-size", 8]
    assert_sentence(cli("recipe", "soup", *options, "--device", "cpu"), 2, "soup takes the mean of whole weights")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_average_predicts_by_itself(precision, request):
    """Accelerate wraps the forward of the network that trains; a copy of the wrapper would run that network."""
    model = bert(dropout=0.0).float()
    AcceleratorState._reset_state(reset_partial_state=True)
    request.addfinalizer(lambda: AcceleratorState._reset_state(reset_partial_state=True))
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    batch = next(iter(batches(1)))
    method = FineTuning(model, adamw(model), attnreg.DropHead(0.2), accelerator=accelerator)
    before = model.eval()(**batch).logits
    method = Averaged(method, wise=0.0)
    for each in batches(20):
        method.step(each)
    torch.testing.assert_close(method.model.eval()(**batch).logits, before, atol=1e-2, rtol=0)
    assert (model.eval()(**batch).logits - before).abs().max() > 0.05


def test_an_average_of_bfloat16_moves():
    model = bert(dropout=0.0).bfloat16()
    method = Averaged(FineTuning(model, sgd(model)), ema=0.99)
    start = weights(method.model).clone()
    for batch in batches(1):
        method.step(batch)
    for parameter in model.parameters():
        parameter.data += 1.0
    model.requires_grad_(False)
    method.method.step = lambda batch: None
    for _ in range(300):
        method.step({})
    assert (weights(method.model) - start).mean() > 0.9


def test_in_the_warm_up_of_a_game_the_average_is_that_of_the_network_to_keep():
    model = bert(dropout=0.0)
    rounds = Rounds(2, warmup_steps=3)
    played = AttackerDefender(model, attnreg.GNetProvider.for_model(model).double(), sgd, rounds=rounds)
    method = Averaged(played, ema=0.5)
    for batch in batches(2):
        method.step(batch)
    assert method.returned_name == "attacker"
    assert method.networks == {"attacker": method.model, "defender": played.defender.model}
    assert not torch.equal(weights(method.model), weights(played.defender.model))


def test_training_is_the_same_as_without():
    def trained(averaged):
        model = bert()
        method = FineTuning(model, sgd(model), attnreg.AttentionDropout(0.2))
        method = Averaged(method, ema=0.9) if averaged else method
        torch.manual_seed(3)
        for batch in batches(3):
            method.step(batch)
            _ = method.model
        return weights(model)

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize("recipe", ["finetune", pytest.param("attendout", marks=pytest.mark.slow)])
def test_a_run_scores_and_saves_the_average(cli, recipe, tmp_path):
    options = ["--train-size", 16, "--epochs", 2, "--device", "cpu", "--output-dir"]
    for name, averages in (("plain", []), ("averaged", ["--ema", 0.9, "--wise-ft", 0.5])):
        ran(cli("recipe", recipe, *averages, *options, name))
    saved = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "averaged")]
    assert not all(torch.equal(*each) for each in zip(*(model.values() for model in saved), strict=True))
    lora = ["--model", "plain/model", "--lora-rank", 2, "--lora-targets", "query", "--wise-ft", 0.5]
    assert_sentence(
        cli("recipe", recipe, *lora, *options, "lora"),
        2,
        "--lora-rank and --wise-ft exclude each other, because LoRA does not train",
    )
    evaluated_again(cli, tmp_path / "averaged", "--device", "cpu")


def test_averages_of_layers_on_several_devices_come_back_on_these():
    model = bert()
    model.classifier.to("meta")
    method = Averaged(FineTuning(model, sgd(model)), ema=0.5, wise=0.5)
    on_cpu = [torch.zeros(weight.shape) for weight in model.parameters()]
    method.load_state_dict({**method.state_dict(), "average": on_cpu, "before": on_cpu})
    devices = [weight.device for weight in model.parameters()]
    assert [[weight.device for weight in method.state_dict()[name]] for name in ("average", "before")] == [devices] * 2
