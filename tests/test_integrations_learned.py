"""What a provider learns by the loss, in the Hugging Face Trainer."""

import json

import pytest
import torch
import transformers as hf

import attnreg
from attnreg.integrations import AttnRegCallback, RegularizedTrainer
from tests.helpers.cases import sample
from tests.helpers.method_cases import weights
from tests.helpers.regularizers import Learned, Priced
from tests.helpers.trainers import Gradients, Rows, Sentences, arguments, bert, column, regularized

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")


def test_what_a_provider_learns_is_learned(tmp_path):
    losses = []
    for price in (0.0, 100.0):
        provider = Learned(price)
        trainer = regularized(tmp_path, provider, bert(0.0))
        trainer.train()
        losses.append(column(trainer, "loss"))
        assert provider.factor != 0.5
    assert losses[1][0] == pytest.approx(losses[0][0] + 25, abs=0.01)
    assert losses[1][-1] < losses[1][0]  # the price has brought the factor down
    assert provider.factor < 0.5
    evaluated = trainer.evaluate(Rows())["eval_loss"]
    assert evaluated < 5  # without the price


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_gradients_of_a_provider_are_of_one_step(tmp_path, accumulated):
    provider = Priced()
    gradients = Gradients(provider.everywhere, provider.in_first)
    trainer = regularized(tmp_path, provider, gradient_accumulation_steps=accumulated)
    trainer.add_callback(gradients)
    provider.everywhere.grad = torch.tensor(7.0)  # left over from before
    trainer.train()
    assert gradients.seen == [[1.0, 1.0]] * (8 // accumulated)


def language_model():
    torch.manual_seed(0)
    dropout = dict.fromkeys(["resid_pdrop", "attn_pdrop", "embd_pdrop"], 0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=8, n_layer=2, n_head=2, **dropout))


def divided(output, labels, num_items_in_batch):
    return torch.nn.functional.cross_entropy(output.logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("case", ["mean of means", "model", "function"])
def test_accumulated_penalties_are_one_penalty(tmp_path, case):
    found = []
    for accumulated in (1, 4):
        provider = Learned(0.5)
        gradients = Gradients(provider.factor)
        model = bert(0.0) if case == "function" else language_model()
        if case == "model":
            model.accepts_loss_kwargs = True
        options = {"per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
        trainer = RegularizedTrainer(
            model,
            arguments(tmp_path, max_steps=1, **options),
            train_dataset=Rows() if case == "function" else Sentences(),
            provider=provider,
            callbacks=[gradients],
            compute_loss_func=divided if case == "function" else None,
        )
        trainer.train()
        found.append([column(trainer, "loss")[0], gradients.seen[0][0]])
    assert found[0][1] == pytest.approx(0.5, abs=0.2)  # of the price alone: the masks' part is small
    assert found[1] == pytest.approx(found[0], rel=1e-4)


class Mine(RegularizedTrainer):
    def train(self, *, resume_from_checkpoint=None):
        return super().train(resume_from_checkpoint=resume_from_checkpoint)


LEARNED = [attnreg.ConcreteDropout, attnreg.LearnableBernoulli, attnreg.AdversarialAttention]


@pytest.mark.parametrize(("kind", "trainer"), [(LEARNED[0], Mine), *sample(zip(LEARNED, 3 * [RegularizedTrainer], strict=True), lambda kind, _: kind is LEARNED[0])])  # fmt: skip
def test_what_a_provider_learns_resumes_to_the_same_end(tmp_path, kind, trainer):
    """From a checkpoint in another folder than that of an older run; a subclass may override `train`."""
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}

    def made(folder, rate=1e-2):
        model = bert()
        return regularized(tmp_path / folder, kind.for_model(model), model, kind=trainer, learning_rate=rate, **options)

    whole, older, resumed = made("a"), made("b", 1e-1), made("b")
    before = weights(whole.handle.provider)
    whole.train()
    older.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert not torch.equal(weights(whole.handle.provider), before)
    assert torch.equal(weights(resumed.handle.provider), weights(whole.handle.provider))
    assert not torch.equal(weights(older.handle.provider), weights(whole.handle.provider))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert column(resumed, "loss") == column(whole, "loss")


IN_TWO_PROCESSES = """
import json, os, sys
import torch
from tests.helpers.regularizers import Learned, Priced
from tests.helpers.trainers import Gradients, bert, regularized
from tests.helpers.method_cases import weights

folder, batch_size = sys.argv[1], int(sys.argv[2])
options = {"optim": "sgd", "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 2}
rank = int(os.environ.get("RANK", 0))
learned = Learned()
with torch.no_grad():
    learned.factor += rank  # the first process's holds
priced = Priced()
gradients = Gradients(priced.everywhere, priced.in_first)
trainer = regularized(folder, learned & priced, bert(0.0), **options)
trainer.add_callback(gradients)
trainer.train()
found = [weights(trainer.handle.provider).tolist(), weights(trainer.model).double().sum().item(), gradients.seen]
open(f"{folder}/{rank}.json", "w").write(json.dumps(found))
"""


def test_two_processes_learn_the_same_provider(warm, tmp_path):
    found = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        words = ["-c", IN_TWO_PROCESSES, folder, 4 // processes]
        code, output = warm.run(*words, cwd=tmp_path, timeout=200, processes=processes)
        assert code == 0, output
        found[processes] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    (alone,), (first, second) = found[1], found[2]
    assert first == second
    assert first[0][0] == pytest.approx(alone[0][0], rel=1e-4)  # a mask's number
    assert first[1] == pytest.approx(alone[1], rel=1e-4)
    assert first[2] == [[2.0, 0.5]] * 4


def test_an_optimizer_that_was_passed_in_must_hold_what_the_provider_learns(tmp_path):
    model = bert()
    provider = attnreg.ConcreteDropout.for_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = attnreg.attach(model, provider & attnreg.GNetProvider.for_model(model))

    def trainer(provider=handle, **options):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        options = {"train_dataset": Rows(), "provider": provider, "optimizers": (optimizer, scheduler), **options}
        return RegularizedTrainer(model, arguments(tmp_path), **options)

    says = r"The optimizer does not hold 1 parameters that Compose learns. Call `optimizer\."
    with pytest.raises(ValueError, match=says):
        trainer()
    with pytest.raises(ValueError, match=r"The optimizer does not hold 1 parameters that Learned learns. "):
        RegularizedTrainer(other := bert(), arguments(tmp_path), provider=Learned(), optimizers=(optimizer, None))
    assert not attnreg.is_attached(other)
    late = trainer(optimizers=(None, None))
    late.optimizer = optimizer
    with pytest.raises(ValueError, match=says):
        late.train()
    optimizer.add_param_group({"params": list(provider.parameters()), "weight_decay": 0.0})
    before = weights(provider)
    trainer().train()
    assert not torch.equal(weights(provider), before)
    assert len(optimizer.param_groups) == 2


def test_training_twice_goes_on_with_the_same_optimizer(tmp_path):
    provider = Learned()
    trainer = regularized(tmp_path, provider)
    trainer.train()
    before = provider.factor.item()
    trainer.train()
    assert provider.factor.item() != before
    assert sum(parameter is provider.factor for g in trainer.optimizer.param_groups for parameter in g["params"]) == 1


def in_stock_trainer(tmp_path, expression):
    model = bert()
    provider = Learned() if expression == "Learned()" else attnreg.parse_provider(expression, model, 8)
    trainer = hf.Trainer(model, arguments(tmp_path), train_dataset=Rows())
    AttnRegCallback(attnreg.attach(model, provider)).add_to(trainer)
    return trainer


NEEDS_MORE = {
    "AttributionProvider()": r"AttributionProvider looks at a batch before the training step on it \(`attribute`\)",
    "CrossTuning(AttributionProvider())": "AttributionProvider looks",
    "HeadMask(1, by='importance')": "HeadMask looks",
    "LearnableBernoulli()": "LearnableBernoulli looks",
    "DropHead(0.2) & OnLayers(ConcreteDropout(), [0])": r"ConcreteDropout adds to the loss \(`penalty`\)",
    "ContextualDropout()": "ContextualDropout adds",
    "AdversarialAttention()": "AdversarialAttention adds",
    "Learned()": "Learned adds",
}


@pytest.mark.parametrize("expression", NEEDS_MORE)
def test_the_stock_trainer_is_refused_where_masks_are_not_all(tmp_path, expression):
    message = f"{NEEDS_MORE[expression]}.*, which Trainer does not support. Use RegularizedTrainer."
    with pytest.raises(ValueError, match=message):
        in_stock_trainer(tmp_path, expression)


def test_parameters_alone_need_more_than_the_stock_trainer(tmp_path):
    class Weighted(Learned):
        penalty = attnreg.MaskProvider.penalty

    model = bert()
    provider = Weighted()
    callback = AttnRegCallback(attnreg.attach(model, provider))
    with pytest.raises(ValueError, match="Weighted is trained by the loss, which Trainer does not support"):
        callback.add_to(hf.Trainer(model, arguments(tmp_path)))
    provider.requires_grad_(False)
    callback.add_to(hf.Trainer(model, arguments(tmp_path)))


@pytest.mark.parametrize("expression", ["HeadMask(1)", "UniDrop()", "DropHead(0.2) & GNetProvider()", "AttributionProvider(method='random')"])  # fmt: skip
def test_masks_alone_work_in_the_stock_trainer(tmp_path, expression):
    trainer = in_stock_trainer(tmp_path, expression)
    trainer.train()
    assert max(column(trainer, "drop_rate/encoder.0")) > 0
