"""`hyperparameter_search` and `model_init`: every trial has a new model, with a fresh copy of the regularizer attached."""

import pickle
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from accelerate.state import GradientState

import attnreg
from attnreg.errors import InputError
from attnreg.integrations import AttnRegCallback, RegularizedTrainer
from attnreg.training import RDropLoss
from tests.helpers.method_cases import weights
from tests.helpers.trainers import Rows, arguments, bert, column

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
    pytest.mark.filterwarnings("ignore:::optuna"),
]
RATES = [1e-2, 1e-3, 1e-2]
STEPS = 2


def space(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", RATES[trial.number], RATES[trial.number])}


def scheduled():
    return attnreg.Scheduled(attnreg.DropKey(), 4, p=[(0, 0.5), (1, 0.0)])


class Noted(hf.TrainerCallback):
    """Keeps what the provider looks like when a training begins, and the rates of its logs."""

    def __init__(self):
        self.begun, self.logs, self.handles = [], [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun.append({name: value.clone() for name, value in self.handle().provider.state_dict().items()})
        self.handles.append(self.handle())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logs.append((logs["loss"], logs["drop_rate/encoder.0"]))


def by_callback(folder, provider, noted, **options):
    callback = AttnRegCallback(provider)
    noted.handle = lambda: callback.handle
    rows = {"train_dataset": Rows(), "eval_dataset": Rows()}
    given = {"model_init": lambda: bert(), "callbacks": [callback, noted], **rows}
    return hf.Trainer(args=arguments(folder, max_steps=STEPS, **options), **given)


def by_trainer(folder, provider, noted, objective=None, **options):
    rows = {"train_dataset": Rows(), "eval_dataset": Rows()}
    given = {"model_init": lambda: bert(), "callbacks": [noted], "objective": objective, **rows}
    trainer = RegularizedTrainer(args=arguments(folder, max_steps=STEPS, **options), provider=provider, **given)
    noted.handle = lambda: trainer.handle
    return trainer


def with_objective(folder, provider, noted, **options):
    return by_trainer(folder, provider, noted, RDropLoss(1.0), **options)


CASES = {  # the schedule in a slow test: the callback has one, too
    "callback": (by_callback, scheduled),
    "schedule": (by_trainer, scheduled),
    "learned": (by_trainer, lambda: attnreg.ConcreteDropout(2, 0.2) & attnreg.AttentionEntropy(0.1)),
    "two passes": (by_trainer, lambda: attnreg.AttributionProvider(0.5, 0.5)),
    "objective": (with_objective, lambda: attnreg.DropKey(0.3)),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name == "schedule")) for name in CASES])  # fmt: skip
def test_every_trial_has_a_fresh_copy_and_the_best_can_be_made_again(tmp_path, case):
    make, regularizer = CASES[case]
    provider, noted = regularizer(), Noted()
    before = {name: value.clone() for name, value in provider.state_dict().items()}
    trainer = make(tmp_path, provider, noted)
    best = trainer.hyperparameter_search(space, n_trials=3, direction="minimize", backend="optuna")
    assert len({id(handle.provider) for handle in [*noted.handles, noted.handles[0]]}) == 3
    for state in noted.begun:
        assert {name: value.tolist() for name, value in state.items()} == {name: value.tolist() for name, value in before.items()}  # fmt: skip
    first, second, third = (noted.logs[STEPS * trial :][:STEPS] for trial in range(3))
    assert first == third  # of one rate
    assert first != second
    assert all(rate > 0 for _, rate in first)
    assert {name: value.tolist() for name, value in provider.state_dict().items()} == {name: value.tolist() for name, value in before.items()}  # fmt: skip
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective
    assert noted.logs[3 * STEPS :] == noted.logs[int(best.run_id) * STEPS :][:STEPS]


@pytest.mark.parametrize("make", [by_callback, by_trainer])
def test_checkpoints_of_trials_hold_their_regularizer(tmp_path, make):
    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    trainer = make(tmp_path, scheduled(), noted := Noted(), load_best_model_at_end=True, **options)
    trainer.hyperparameter_search(space, n_trials=2, direction="minimize", backend="optuna")
    saved = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/attnreg"))
    assert saved == [f"run-{run}/checkpoint-{step}/attnreg" for run in (0, 1) for step in (1, 2)]
    for run in (0, 1):
        kept = attnreg.Scheduled.from_pretrained(tmp_path / f"run-{run}/checkpoint-1/attnreg")
        assert int(kept.steps) == 1
    best = trainer.state.best_model_checkpoint  # its regularizer was restored, without a warning
    assert int(noted.handle().provider.steps) == int(best[-1])


def test_a_handle_is_refused_before_the_first_trial(tmp_path):
    model = bert()
    handle, noted = attnreg.attach(model, attnreg.DropKey(0.1)), Noted()
    trainer = by_callback(tmp_path, handle, noted)
    with pytest.raises(
        InputError, match="a new model for every trial, but a handle belongs to one: pass the provider to"
    ):
        trainer.hyperparameter_search(space, n_trials=2, direction="minimize", backend="optuna")
    assert trainer.state.global_step == 0
    says = r"`model_init` makes a new model for every training, but a handle belongs to one: pass the provider instead"
    with pytest.raises(InputError, match=says):
        by_trainer(tmp_path, handle, noted)


def test_layers_are_chosen_in_the_regularizer(tmp_path):
    trainer = by_trainer(tmp_path, attnreg.OnLayers(attnreg.AttentionLayerDrop(1.0), [0]), Noted())
    trainer.train()
    assert trainer.handle.drop_rates() == {"encoder.0": 1.0, "encoder.1": 0.0}


def test_a_callback_that_has_trained_is_not_attached_to_another_model_in_silence(tmp_path):
    callback, rows = AttnRegCallback(scheduled()), {"train_dataset": Rows()}
    first, second = bert(), bert()
    hf.Trainer(first, arguments(tmp_path, max_steps=1), callbacks=[callback], **rows).train()
    with pytest.raises(RuntimeError, match="already attached"):
        hf.Trainer(second, arguments(tmp_path, max_steps=1), callbacks=[callback], **rows)


@pytest.mark.parametrize("case", ["callback", "learned"])
def test_a_trainer_goes_to_another_process_between_trials(tmp_path, case):
    """As Ray Tune sends it: without its model, to train there."""
    make, regularizer = CASES[case]
    trainer = make(tmp_path, regularizer(), Noted())
    trainer.model_init = bert_of_this_module
    trainer.callback_handler.callbacks = [each for each in trainer.callback_handler.callbacks if not isinstance(each, Noted)]  # fmt: skip
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
    GradientState().dataloader_references = [None]  # other trainings of this process leave weak references there
    copied = pickle.loads(pickle.dumps(trainer))
    copied.train()
    assert column(copied, "drop_rate/encoder.0")
    trainer.train()
    assert torch.equal(weights(copied.model), weights(trainer.model))


def bert_of_this_module():
    return bert()


def test_no_name_of_ours_is_one_of_the_trainers():
    """The search sets `trainer.objective`, which would replace ours."""
    folder = Path(hf.__file__).parent
    files = [folder / "trainer.py", *(folder / "integrations").glob("*.py"), *folder.glob("*seq2seq*.py")]
    theirs = {
        name for file in files for name in re.findall(r"\b(?:self|trainer)\.(\w+)", file.read_text(encoding="utf-8"))
    }
    source = (Path(attnreg.__file__).parent / "integrations" / "trainer.py").read_text(encoding="utf-8")
    ours = {*re.findall(r"self\.(\w+)(?:: [^=]*)? = ", source), *vars(RegularizedTrainer)} - {
        *dir(object),
        "__module__",
    }
    assert "_objective" in ours
    assert {name for name in ours & theirs if not name.startswith("__")} == {
        "model_accepts_loss_kwargs"
    }  # set on purpose
