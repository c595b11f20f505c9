"""Providers in the Hugging Face Trainer."""

import json
import os
import subprocess
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers as hf
from torch.utils.data import Dataset

import attnreg
from attnreg.integrations import ADDropTrainer, AttnRegCallback, Seq2SeqADDropTrainer
from tests.cases import MODELS, SMALL, TEXT
from tests.test_distributed import launched

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")


class Rows(Dataset):
    def __init__(self, size=16, pair=False):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 40, (size, 6), generator=generator)
        self.labels = torch.randint(3, 40, (size, 5), generator=generator) if pair else self.ids[:, 0] % 2

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "attention_mask": torch.ones(6).long(), "labels": self.labels[index]}


def bert(dropout=0.1, **options):
    torch.manual_seed(0)
    options = {**TEXT, **SMALL, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, **options}
    return hf.BertForSequenceClassification(hf.BertConfig(**options))


def arguments(folder, cls=hf.TrainingArguments, **options):
    options = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    return cls(str(folder), **options)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def column(trainer, name):
    return [record[name] for record in trainer.state.log_history if name in record]


def ad_drop(p=0.5, q=0.5, **options):
    return attnreg.CrossTuning(attnreg.AttributionProvider(p, q), **options)


VARIANTS = {
    "plain": {},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "gradient checkpointing": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_dropping_it_is_the_stock_trainer(tmp_path, variant):
    model = bert()
    model.accepts_loss_kwargs = False  # the stock Trainer's error under gradient accumulation
    stock = hf.Trainer(model, arguments(tmp_path, **VARIANTS[variant]), train_dataset=Rows())
    stock.train()
    ours = ADDropTrainer(
        bert(),
        arguments(tmp_path, **VARIANTS[variant]),
        train_dataset=Rows(),
        provider=attnreg.AttributionProvider(q=0.0),
    )
    draws = []
    ours.handle.provider._region = lambda site: draws.append(1) or torch.zeros(site.shape, dtype=torch.bool)
    original = attnreg.AttributionProvider.forward

    def forward(site):  # its draws are the only other difference to the stock Trainer's
        state = torch.get_rng_state()
        mask = original(ours.handle.provider, site)
        torch.set_rng_state(state)
        return mask if mask is None else None

    ours.handle.provider.forward = forward
    ours.train()
    assert draws
    assert column(ours, "loss") == column(stock, "loss")
    assert torch.equal(weights(ours.model), weights(stock.model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_in_every_other_epoch(tmp_path, variant):
    options = {**VARIANTS[variant], "num_train_epochs": 4}
    trainer = ADDropTrainer(bert(), arguments(tmp_path, **options), train_dataset=Rows(), provider=ad_drop())
    trainer.train()
    steps = 4 // options.get("gradient_accumulation_steps", 1)
    rates = [record.get("drop_rate/encoder.0") for record in trainer.state.log_history if "loss" in record]
    assert [rate is not None for rate in rates] == ([False] * steps + [True] * steps) * 2
    assert all(0.1 < rate < 0.4 for rate in rates if rate is not None)
    assert weights(trainer.model).isfinite().all()


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    results = []
    for size, accumulated in ((8, 1), (4, 2), (2, 4)):
        provider = attnreg.AttributionProvider(0.5, 1.0)  # q = 1 leaves nothing to chance
        trainer = ADDropTrainer(
            bert(dropout=0.0),
            arguments(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulated),
            train_dataset=Rows(),
            provider=provider,
        )
        trainer.train()
        results.append((column(trainer, "grad_norm"), weights(trainer.model)))
    for norms, parameters in results[1:]:
        assert norms == pytest.approx(results[0][0], rel=1e-4)
        assert (parameters - results[0][1]).abs().max() < 2e-3  # Adam magnifies the rounding of near-zero gradients


def test_it_resumes_to_the_same_end(tmp_path):
    def trainer(folder):
        options = {"num_train_epochs": 4, "save_strategy": "steps", "save_steps": 3}
        return ADDropTrainer(bert(), arguments(folder, **options), train_dataset=Rows(), provider=ad_drop())

    whole = trainer(tmp_path)
    whole.train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert column(resumed, "loss") == column(whole, "loss")
    assert column(resumed, "drop_rate/encoder.0") == column(whole, "drop_rate/encoder.0")
    assert resumed.handle.provider.epoch == 3
    saved = attnreg.CrossTuning.from_pretrained(tmp_path / "checkpoint-6" / "attnreg")
    assert (saved.epoch, saved.provider.p) == (1, 0.5)


def test_sequence_to_sequence(tmp_path):
    model = next(case for case in MODELS if case.name == "marian").build()
    handle = attnreg.attach(model, attnreg.AttributionProvider(0.5, 0.5), stacks=["encoder", "cross"])
    trainer = Seq2SeqADDropTrainer(
        model, arguments(tmp_path, hf.Seq2SeqTrainingArguments), train_dataset=Rows(pair=True), provider=handle
    )
    assert isinstance(trainer, hf.Seq2SeqTrainer)
    trainer.train()
    assert column(trainer, "drop_rate/encoder.0")
    assert column(trainer, "drop_rate/cross.1")
    assert trainer.predict(Rows(4, pair=True), max_new_tokens=3).metrics["test_loss"] > 0


class Reporter(hf.TrainerCallback):
    """Stands for the callbacks of `report_to`: keeps what it is given, when it is given it."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_a_schedule_in_the_stock_trainer(tmp_path):
    model, reporter = bert(), Reporter()
    provider = attnreg.BernoulliScheduleProvider([(0, 0.8), (1, 0.0)], total_steps=8)
    handle = attnreg.attach(model, provider)
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_steps": 2}
    trainer = hf.Trainer(
        model, arguments(tmp_path, **options), train_dataset=Rows(), eval_dataset=Rows(), callbacks=[reporter]
    )
    AttnRegCallback(handle).add_to(trainer)
    trainer.train()
    assert int(provider.steps) == 8
    rates = [log["drop_rate/encoder.0"] for log in reporter.logs if "loss" in log]
    expected = [0.75, 0.55, 0.35, 0.15]  # the mean of two steps: 0.8 and 0.7, and so on
    assert rates == pytest.approx(expected, abs=0.1)
    assert column(trainer, "drop_rate/encoder.0") == rates
    assert all("drop_rate/encoder.0" not in log for log in reporter.logs if "eval_loss" in log)
    json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    middle = attnreg.BernoulliScheduleProvider.from_pretrained(tmp_path / "checkpoint-4" / "attnreg")
    assert int(middle.steps) == 4
    again = bert()
    handle = attnreg.attach(again, attnreg.BernoulliScheduleProvider([(0, 0.8), (1, 0.0)], total_steps=8))
    resumed = hf.Trainer(again, arguments(tmp_path, **options), train_dataset=Rows(), eval_dataset=Rows())
    AttnRegCallback(handle).add_to(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(weights(again), weights(model))


def test_resuming_without_the_saved_provider_warns(tmp_path):
    model = bert()
    options = {"save_strategy": "epoch"}
    hf.Trainer(model, arguments(tmp_path, **options), train_dataset=Rows()).train()
    handle = attnreg.attach(model, attnreg.BernoulliScheduleProvider([(0, 0.8), (1, 0.0)], total_steps=8))
    trainer = hf.Trainer(model, arguments(tmp_path, **options), train_dataset=Rows())
    AttnRegCallback(handle).add_to(trainer)
    with pytest.warns(UserWarning, match="Expected the provider of step 4 in .*, found none"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_provider_that_cannot_be_saved_does_not_stop_the_training(tmp_path):
    provider = attnreg.AttributionProvider(target=lambda output, batch: output.logits[:, 0])
    trainer = ADDropTrainer(bert(), arguments(tmp_path, save_strategy="epoch"), train_dataset=Rows(), provider=provider)
    with pytest.warns(UserWarning, match="The checkpoint is without its provider. Expected the arguments"):
        trainer.train()
    assert (tmp_path / "checkpoint-8").is_dir()


def test_model_init_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Expected a `model`, got `model_init`"):
        ADDropTrainer(args=arguments(tmp_path), model_init=bert)


def test_the_default_is_ad_drop_with_cross_tuning(tmp_path):
    provider = ADDropTrainer(bert(), arguments(tmp_path)).handle.provider
    assert isinstance(provider, attnreg.CrossTuning)
    assert isinstance(provider.provider, attnreg.AttributionProvider)


@pytest.mark.parametrize("by_trainer", [True, False])
def test_a_lora_model(tmp_path, by_trainer):
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks for it
    base = bert()
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    model = peft.get_peft_model(base, peft.LoraConfig(peft.TaskType.SEQ_CLS, r=2, target_modules=["query", "value"]))
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if by_trainer:
        trainer = ADDropTrainer(model, arguments(tmp_path), train_dataset=Rows(), provider=ad_drop(offset=0))
        trainer.train()
        assert column(trainer, "drop_rate/encoder.1")
        handle = trainer.handle
    else:
        provider = attnreg.AttributionProvider(0.5, 0.5)
        handle = attnreg.attach(model, provider)
        batch = {name: torch.stack([Rows()[i][name] for i in range(4)]) for name in ("input_ids", "labels")}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        provider.attribute(model, batch)
        model.train()(**batch).loss.backward()
        optimizer.step()
        assert handle.drop_rates()["encoder.0"] > 0.1
    assert [site.label for site in handle.sites] == ["encoder.0", "encoder.1"]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trainable
    frozen = {name for name, parameter in base.named_parameters() if not parameter.requires_grad}
    after = {name.replace("base_layer.", ""): parameter for name, parameter in base.named_parameters()}
    assert all(torch.equal(after[name], before[name]) for name in before if name in frozen)
    assert any("lora_B" in name and parameter.abs().max() > 0 for name, parameter in model.named_parameters())


class Learned(attnreg.MaskProvider):
    """Weighs attention by a number that it learns and that has a price."""

    def __init__(self, price=1.0):
        super().__init__()
        self.price = price
        self.factor = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, site):
        return attnreg.Mask(weights=self.factor)

    def penalty(self):
        return self.price * self.factor**2


def test_what_a_provider_learns_is_learned(tmp_path):
    losses = []
    for price in (0.0, 100.0):
        provider = Learned(price)
        trainer = ADDropTrainer(bert(0.0), arguments(tmp_path), train_dataset=Rows(), provider=provider)
        trainer.train()
        losses.append(column(trainer, "loss"))
        assert provider.factor != 0.5
    assert losses[1][0] == pytest.approx(losses[0][0] + 25, abs=0.01)
    assert losses[1][-1] < losses[1][0]  # the price has brought the factor down
    assert provider.factor < 0.5
    evaluated = trainer.evaluate(Rows())["eval_loss"]
    assert evaluated < 5  # without the price


class Priced(attnreg.MaskProvider):
    """Drops nothing; has two numbers at a constant price, the second in the first process only."""

    def __init__(self):
        super().__init__()
        self.everywhere = torch.nn.Parameter(torch.tensor(0.5))
        self.in_first = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, site):
        return None

    def penalty(self):
        rank = int(os.environ.get("RANK", 0))
        return self.everywhere * (1 + 2 * rank) + (0 if rank else self.in_first)


class Gradients(hf.TrainerCallback):
    """Keeps a parameter's gradient at each optimizer step."""

    def __init__(self, *parameters):
        self.parameters = parameters
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seen.append([None if p.grad is None else p.grad.item() for p in self.parameters])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_gradients_of_a_provider_are_of_one_step(tmp_path, accumulated):
    provider = Priced()
    gradients = Gradients(provider.everywhere, provider.in_first)
    trainer = ADDropTrainer(
        bert(),
        arguments(tmp_path, gradient_accumulation_steps=accumulated),
        train_dataset=Rows(),
        provider=provider,
        callbacks=[gradients],
    )
    provider.everywhere.grad = torch.tensor(7.0)  # left over from before
    trainer.train()
    assert gradients.seen == [[1.0, 1.0]] * (8 // accumulated)


def language_model():
    torch.manual_seed(0)
    dropout = dict.fromkeys(["resid_pdrop", "attn_pdrop", "embd_pdrop"], 0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=8, n_layer=2, n_head=2, **dropout))


class Sentences(Rows):
    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


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
        trainer = ADDropTrainer(
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


@pytest.mark.parametrize("kind", [attnreg.ConcreteDropout, attnreg.LearnableBernoulli, attnreg.AdversarialAttention])
def test_what_a_provider_learns_resumes_to_the_same_end(tmp_path, kind):
    def trainer():
        model = bert()
        options = {"num_train_epochs": 4, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
        return ADDropTrainer(
            model, arguments(tmp_path, **options), train_dataset=Rows(), provider=kind.for_model(model)
        )

    whole = trainer()
    before = weights(whole.handle.provider)
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert not torch.equal(weights(whole.handle.provider), before)
    assert torch.equal(weights(resumed.handle.provider), weights(whole.handle.provider))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert column(resumed, "loss") == column(whole, "loss")


IN_TWO_PROCESSES = """
import json, os, sys
import torch
from attnreg.integrations import ADDropTrainer
from tests.test_integrations import Gradients, Learned, Priced, Rows, arguments, bert, weights

folder, batch_size = sys.argv[1], int(sys.argv[2])
options = {"optim": "sgd", "per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 2}
rank = int(os.environ.get("RANK", 0))
learned = Learned()
with torch.no_grad():
    learned.factor += rank  # the first process's holds
priced = Priced()
gradients = Gradients(priced.everywhere, priced.in_first)
trainer = ADDropTrainer(
    bert(0.0), arguments(folder, **options), train_dataset=Rows(), provider=learned & priced, callbacks=[gradients]
)
trainer.train()
found = [weights(trainer.handle.provider).tolist(), weights(trainer.model).double().sum().item(), gradients.seen]
open(f"{folder}/{rank}.json", "w").write(json.dumps(found))
"""


def test_two_processes_learn_the_same_provider(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_TWO_PROCESSES)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    found = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        command = launched(script, folder, 4 // processes, processes=processes)
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
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
        return ADDropTrainer(model, arguments(tmp_path), **options)

    says = r"Expected the optimizer to hold what Compose learns, got one without 1 of its parameters: call `optimizer\."
    with pytest.raises(ValueError, match=says):
        trainer()
    with pytest.raises(ValueError, match="Learned learns, got one without 1 "):
        ADDropTrainer(other := bert(), arguments(tmp_path), provider=Learned(), optimizers=(optimizer, None))
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
    trainer = ADDropTrainer(bert(), arguments(tmp_path), train_dataset=Rows(), provider=provider)
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
    "AttributionProvider()": r"AttributionProvider, which looks at each batch before it is trained on \(`attribute`\)",
    "CrossTuning(AttributionProvider(method='random'))": "AttributionProvider, which looks",
    "HeadMask(1, by='importance')": "HeadMask, which looks",
    "LearnableBernoulli()": "LearnableBernoulli, which looks",
    "DropHead(0.2) & OnLayers(ConcreteDropout(), [0])": r"ConcreteDropout, which adds to the loss \(`penalty`\)",
    "ContextualDropout()": "ContextualDropout, which adds",
    "AdversarialAttention()": "AdversarialAttention, which adds",
    "Learned()": "Learned, which adds",
}


@pytest.mark.parametrize("expression", NEEDS_MORE)
def test_the_stock_trainer_is_refused_where_masks_are_not_all(tmp_path, expression):
    message = f"Expected an ADDropTrainer for {NEEDS_MORE[expression]}.*, got a Trainer, which does not see to that"
    with pytest.raises(ValueError, match=message):
        in_stock_trainer(tmp_path, expression)


def test_parameters_alone_need_more_than_the_stock_trainer(tmp_path):
    class Weighted(Learned):
        penalty = attnreg.MaskProvider.penalty

    model = bert()
    provider = Weighted()
    callback = AttnRegCallback(attnreg.attach(model, provider))
    with pytest.raises(ValueError, match="for Weighted, which learns by the loss, got a Trainer"):
        callback.add_to(hf.Trainer(model, arguments(tmp_path)))
    provider.requires_grad_(False)
    callback.add_to(hf.Trainer(model, arguments(tmp_path)))


@pytest.mark.parametrize("expression", ["HeadMask(1)", "UniDrop()", "DropHead(0.2) & GNetProvider()"])
def test_masks_alone_work_in_the_stock_trainer(tmp_path, expression):
    trainer = in_stock_trainer(tmp_path, expression)
    trainer.train()
    assert max(column(trainer, "drop_rate/encoder.0")) > 0
