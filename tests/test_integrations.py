"""Providers in the Hugging Face Trainer."""

import copy
import json
import re
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.data import IterableDataset

import attnreg
from attnreg.errors import InputError
from attnreg.injection.running import forward_pass
from attnreg.integrations import AttnRegCallback, RegularizedTrainer
from tests.helpers.cases import MODELS, sample
from tests.helpers.games import make_game
from tests.helpers.method_cases import weights
from tests.helpers.trainers import Rows, arguments, bert, column, regularized

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")


def ad_drop(p=0.5, q=0.5, **options):
    return attnreg.CrossTuning(attnreg.AttributionProvider(p, q), **options)


FIELDS = hf.TrainingArguments.__dataclass_fields__  # of this version of transformers
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
VARIANTS = {
    "plain": {},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "gradient checkpointing": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
    "label smoothing": {"label_smoothing_factor": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("variant", sample(VARIANTS, lambda name: name.startswith("gradient")))
def test_without_dropping_it_is_the_stock_trainer(tmp_path, monkeypatch, variant):
    model = bert()
    model.accepts_loss_kwargs = False  # the stock Trainer's error under gradient accumulation
    stock = hf.Trainer(model, arguments(tmp_path, **VARIANTS[variant]), train_dataset=Rows())
    stock.train()
    ours = regularized(tmp_path, attnreg.AttributionProvider(q=0.0), **VARIANTS[variant])
    draws = []

    def drawn():  # the seeds of passes are the only other difference to the stock Trainer's
        state = torch.get_rng_state()
        draws.append(torch.randint(2**62, ()))
        torch.set_rng_state(state)
        return draws[-1]

    monkeypatch.setattr(forward_pass, "new_seed", drawn)
    ours.train()
    assert draws
    assert column(ours, "loss") == column(stock, "loss")
    assert torch.equal(weights(ours.model), weights(stock.model))


@pytest.mark.parametrize("variant", sample(VARIANTS, lambda name: name.startswith("gradient")))
def test_masks_in_every_other_epoch(tmp_path, variant):
    trainer = regularized(tmp_path, ad_drop(), **VARIANTS[variant], num_train_epochs=4)
    trainer.train()
    steps = 4 // VARIANTS[variant].get("gradient_accumulation_steps", 1)
    rates = [record.get("drop_rate/encoder.0") for record in trainer.state.log_history if "loss" in record]
    assert [rate is not None for rate in rates] == ([False] * steps + [True] * steps) * 2
    assert all(0.1 < rate < 0.4 for rate in rates if rate is not None)
    assert weights(trainer.model).isfinite().all()


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    results = []
    for size, accumulated in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated, "max_steps": 3}
        provider = attnreg.AttributionProvider(0.5, 1.0)  # q = 1 leaves nothing to chance
        trainer = regularized(tmp_path, provider, bert(dropout=0.0), **options)
        trainer.train()
        results.append((column(trainer, "grad_norm"), weights(trainer.model)))
    (norms, parameters), (others, further) = results
    assert others == pytest.approx(norms, rel=1e-4)
    assert (further - parameters).abs().max() < 2e-3  # Adam magnifies the rounding of near-zero gradients


def test_it_resumes_to_the_same_end(tmp_path):
    options = {"num_train_epochs": 4, "save_strategy": "steps", "save_steps": 3}
    whole, resumed = (regularized(tmp_path, ad_drop(), **options) for _ in range(2))
    whole.train()
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

    class Both(RegularizedTrainer, hf.Seq2SeqTrainer):
        pass

    options = arguments(tmp_path, hf.Seq2SeqTrainingArguments)
    trainer = Both(model, options, train_dataset=Rows(pair=True), provider=handle)
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


def with_schedule(folder, *callbacks, **options):
    """The stock Trainer, with a schedule of eight steps; and the schedule."""
    model, provider = bert(), attnreg.BernoulliScheduleProvider([(0, 0.8), (1, 0.0)], total_steps=8)
    handle = attnreg.attach(model, provider)
    rows = {"train_dataset": Rows(), "eval_dataset": Rows()}
    trainer = hf.Trainer(model, arguments(folder, **options), **rows, callbacks=[*callbacks])
    AttnRegCallback(handle).add_to(trainer)
    return trainer, provider


class Stream(IterableDataset):
    """Rows without a length, four batches of them."""

    def __iter__(self):
        rows = Rows()
        return (rows[number] for number in range(len(rows)))


def test_epochs_are_passes_over_data_without_a_length_too(tmp_path):
    trainer = regularized(tmp_path, attnreg.CrossTuning(attnreg.DropKey(0.5)), rows=Stream(), max_steps=16)
    trainer.train()
    rates = [record.get("drop_rate/encoder.0") for record in trainer.state.log_history if "loss" in record]
    assert [rate is not None for rate in rates] == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4


def test_resuming_data_without_a_length_warns_where_epochs_matter(tmp_path):
    options = {"rows": Stream(), "max_steps": 8, "save_strategy": "steps", "save_steps": 6}
    for provider in (attnreg.CrossTuning(attnreg.DropKey(0.5)), attnreg.DropKey(0.5)):
        regularized(tmp_path, provider, **options).train()
        again = regularized(tmp_path, copy.deepcopy(provider), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        said = [str(each.message) for each in caught if "resumes data without a length" in str(each.message)]
        assert len(said) == isinstance(provider, attnreg.CrossTuning)


def test_the_loss_of_the_docs_is_that_of_the_whole_step_under_gradient_accumulation(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "trainer.md").read_text()
    [block] = (each for each in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "def weighted" in each)
    after = []
    for parts in (1, 2):
        options = {"gradient_accumulation_steps": parts, "per_device_train_batch_size": 8 // parts, "max_steps": 1}
        trainer = regularized(tmp_path, attnreg.AttentionEntropy(0.5), bert(0.0), optim="sgd", **options)
        names = {"trainer": trainer}
        exec(block, names)
        trainer.compute_loss_func = names["weighted"]
        trainer.train()
        after.append(weights(trainer.model))
        assert trainer.evaluate(Rows())["eval_loss"] > 0
    assert not torch.equal(after[0], weights(bert(0.0)))
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=1e-6)


def test_a_provider_that_learns_by_another_loss_is_refused(tmp_path):
    model, says = bert(), "LearnableBernoulli learns by the model's own loss, but training has `{}`: give"
    with pytest.raises(InputError, match=says.format("label_smoothing_factor")):
        regularized(tmp_path, attnreg.LearnableBernoulli(2), model, label_smoothing_factor=0.1)
    with pytest.raises(InputError, match=says.format("compute_loss_func")):
        RegularizedTrainer(
            model,
            arguments(tmp_path),
            train_dataset=Rows(),
            provider=attnreg.LearnableBernoulli(2),
            compute_loss_func=lambda outputs, labels, **_: -outputs.logits.sum(),
        )
    assert not attnreg.is_attached(model)


def test_a_state_that_does_not_fit_is_refused_in_a_sentence(tmp_path):
    options = {"save_strategy": "epoch", "num_train_epochs": 2}
    regularized(tmp_path, attnreg.CrossTuning(attnreg.DropHead(0.5)), **options).train()
    other = regularized(tmp_path, attnreg.Scheduled(attnreg.DropHead(), 8, p=[(0, 0.5), (1, 0)]), **options)
    says = "The state of the CrossTuning in .*attnreg does not fit the Scheduled of this training: go on with"
    with pytest.raises(InputError, match=says):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_drop_rate_is_the_mean_of_the_steps_in_which_its_site_ran():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

        def forward(self, x, count=2):
            return [tower(x) for tower in self.towers[:count]]

    x = torch.zeros(2, 5, 8)
    model = Towers().train()
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0), example_inputs=(x,))
    callback, state, logs = AttnRegCallback(handle), hf.TrainerState(log_history=[{}]), {"learning_rate": 1e-3}
    for count in (1, 2, 1):
        model(x, count)
        callback.on_step_end(None, state, None)
    callback.on_log(None, state, None, logs)
    labels = [site.label for site in handle.sites]
    assert len(labels) == 2
    assert [logs[f"drop_rate/{label}"] for label in labels] == [1, 1]


def test_a_schedule_in_the_stock_trainer(tmp_path):
    reporter, options = Reporter(), {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_steps": 2}
    trainer, provider = with_schedule(tmp_path, reporter, **options)
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
    resumed, _ = with_schedule(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(weights(resumed.model), weights(trainer.model))


def test_the_best_checkpoint_brings_its_provider(tmp_path):
    kept = {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 3, "load_best_model_at_end": True}
    provider = attnreg.ConcreteDropout(2, p=0.2)
    rows = {"train_dataset": Rows(), "eval_dataset": Rows()}
    best = {"metric_for_best_model": "worse", "greater_is_better": False}
    options = arguments(tmp_path, **kept, **best, learning_rate=0.1)
    epochs = iter(range(9))
    trainer = RegularizedTrainer(
        bert(), options, provider=provider, compute_metrics=lambda _: {"worse": next(epochs)}, **rows
    )
    trainer.train()
    saved = {
        step: attnreg.ConcreteDropout.from_pretrained(tmp_path / f"checkpoint-{step}" / "attnreg").logits
        for step in (4, 12)
    }
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    assert torch.equal(provider.logits, saved[4])
    assert not torch.equal(saved[4], saved[12])


def test_resuming_without_the_saved_provider_warns(tmp_path):
    hf.Trainer(bert(), arguments(tmp_path, save_strategy="epoch"), train_dataset=Rows()).train()
    trainer, _ = with_schedule(tmp_path, save_strategy="epoch")
    with pytest.warns(UserWarning, match="There is no provider in .*checkpoint-4.attnreg. Bernoulli"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_callback_alone_refuses_the_provider_of_another_training(tmp_path):
    options = {"save_strategy": "epoch", "logging_steps": 1}
    for folder, rate in (("a", 0.1), ("b", 0.2)):
        with_schedule(tmp_path / folder, learning_rate=rate, **options)[0].train()
    trainer, _ = with_schedule(tmp_path / "b", learning_rate=0.1, **options)
    with pytest.raises(InputError, match=r"The Trainer resumes another checkpoint than .*b.checkpoint-4, in which"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    file = tmp_path / "b" / "checkpoint-4" / "trainer_state.json"
    file.write_text(re.sub(r'"loss": [\d.]+', '"loss": NaN', file.read_text()))
    with_schedule(tmp_path / "b", **options)[0].train(resume_from_checkpoint=str(file.parent))


def test_a_second_training_logs_its_own_drop_rates(tmp_path):
    provider = attnreg.BernoulliScheduleProvider([(0, 1), (0.45, 1), (0.46, 0), (1, 0)], total_steps=16)
    trainer = regularized(tmp_path, provider, logging_steps=3)
    for expected in (1.0, 0.0):
        trainer.train()
        assert column(trainer, "drop_rate/encoder.0")[0] == expected


def test_a_provider_that_cannot_be_saved_does_not_stop_the_training(tmp_path):
    provider = attnreg.AttributionProvider(target=lambda output, batch: output.logits[:, 0])
    trainer = regularized(tmp_path, provider, save_strategy="epoch")
    with pytest.warns(UserWarning, match="without its provider. AttributionProvider cannot be saved"):
        trainer.train()
    assert (tmp_path / "checkpoint-8").is_dir()


GAME = r"one model with one optimizer, but AttackerDefender .* call its `step"
BY_NAME = r"^Pass the regularizer by its name: .*provider=\.\.\.\)`\.$"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda args: RegularizedTrainer(bert(), attnreg.DropHead(0.1), args), BY_NAME),
        (lambda args: RegularizedTrainer(bert(), args, regularizer=attnreg.DropHead(0.1)), BY_NAME),
        (lambda args: RegularizedTrainer(make_game(), args), GAME),
        (lambda args: RegularizedTrainer(bert(), args, provider=make_game()), GAME),
        (lambda args: AttnRegCallback(attnreg.attach(bert(), attnreg.DropHead())).add_to(Rows()), r"a transformers Trainer, got a Rows from tests\.helpers\.trainers\. "),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, make, sentence):
    with pytest.raises(InputError, match=sentence):
        make(arguments(tmp_path))


class Strict(hf.BertForSequenceClassification):
    """Takes nothing else."""

    def forward(self, input_ids, labels=None):
        return super().forward(input_ids=input_ids, labels=labels)


class Renamed(RegularizedTrainer):
    """Calls the model, its batches and its loss by names of its own, as sentence-transformers and SetFit do."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {"input_ids": inputs["rows"], "labels": inputs["labels"]})

    def log(self, logs, *args, **kwargs):
        super().log({f"embedding_{name}" if name == "loss" else name: value for name, value in logs.items()})


def renamed(folder, provider):
    rows = [{"rows": row["input_ids"], "labels": row["labels"]} for row in Rows()]
    return regularized(folder, provider, Strict(bert().config), rows, Renamed, remove_unused_columns=False)


def test_a_batch_that_the_model_does_not_take(tmp_path):
    says = r"the batch to be a dict of arguments of Strict\.forward\(input_ids, labels\), got 'rows' in it"
    with pytest.raises(ValueError, match=says):
        renamed(tmp_path, attnreg.AttributionProvider()).train()

    def wrong(output, batch):
        raise TypeError("the user's own")

    with pytest.raises(TypeError, match="the user's own"):
        regularized(tmp_path, attnreg.AttributionProvider(target=wrong)).train()


def test_a_loss_of_another_name(tmp_path):
    trainer = renamed(tmp_path, attnreg.AttentionDropout(0.5))
    trainer.train()
    assert len(column(trainer, "drop_rate/encoder.0")) == len(column(trainer, "embedding_loss")) == 8


def test_a_lora_model(tmp_path):
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft asks for it
    base = bert()
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    model = peft.get_peft_model(base, peft.LoraConfig(peft.TaskType.SEQ_CLS, r=2, target_modules=["query", "value"]))
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trainer = regularized(tmp_path, ad_drop(offset=0), model)
    trainer.train()
    assert column(trainer, "drop_rate/encoder.1")
    assert [site.label for site in trainer.handle.sites] == ["encoder.0", "encoder.1"]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trainable
    frozen = {name for name, parameter in base.named_parameters() if not parameter.requires_grad}
    after = {name.replace("base_layer.", ""): parameter for name, parameter in base.named_parameters()}
    assert all(torch.equal(after[name], before[name]) for name in before if name in frozen)
    assert any("lora_B" in name and parameter.abs().max() > 0 for name, parameter in model.named_parameters())


def test_a_trainer_has_one_callback(tmp_path):
    model = bert()
    handle = attnreg.attach(model, attnreg.DropKey(0.1))
    given = {"model": model, "args": arguments(tmp_path), "train_dataset": Rows()}
    with pytest.raises(InputError, match="another AttnRegCallback: keep one"):
        RegularizedTrainer(**given, provider=handle, callbacks=[AttnRegCallback(handle)])
    trainer = hf.Trainer(**given, callbacks=[AttnRegCallback(handle)])
    with pytest.raises(InputError, match="another AttnRegCallback: keep one"):
        AttnRegCallback(handle).add_to(trainer)
