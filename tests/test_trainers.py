"""Providers in the trainers people use: what must hold in each, and the blocks of docs/trainer.md that need more than dev."""

import json
import re
import warnings

import peft
import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader

import attnreg
from attnreg.integrations import AttnRegCallback
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.repository import ROOT, run_script
from tests.helpers.trainers import EXTRA, QUIET, WORDS, Rows, arguments, bert, dpo, sentences, seq2seq, sft

pytestmark = QUIET


class Spied(attnreg.BernoulliScheduleProvider):
    """A schedule that keeps count of what it is asked and told."""

    def __init__(self):
        super().__init__([(0, 0.5), (1, 0.3)], total_steps=8)
        self._masks, self.epochs = 0, []

    @property
    def masks(self):
        return self._masks  # not a setting, which gradient checkpointing compares

    def forward(self, site):
        assert torch.is_grad_enabled()
        self._masks += 1
        return super().forward(site)

    def on_epoch(self, epoch):
        self.epochs.append(epoch)


def added(trainer, handle):
    AttnRegCallback(handle).add_to(trainer)
    return handle, trainer.train, trainer.evaluate


def in_trainer(provider, folder, tiny_models):
    model = bert()
    options = arguments(folder, gradient_accumulation_steps=2)
    trainer = hf.Trainer(model, options, train_dataset=Rows(), eval_dataset=Rows())
    return added(trainer, attnreg.attach(model, provider))


def in_seq2seq_trainer(provider, folder, tiny_models):
    kind, given = seq2seq(folder, tiny_models, predict_with_generate=True, generation_max_length=4)
    return added(kind(**given), attnreg.attach(given["model"], provider, stacks=["encoder", "decoder", "cross"]))


def in_sft_trainer(provider, folder, tiny_models):
    kind, given = sft(folder, tiny_models)
    return added(kind(**given), attnreg.attach(given["model"], provider))


def in_dpo_trainer(provider, folder, tiny_models):
    kind, given = dpo(folder, tiny_models)
    handle = attnreg.attach(given["model"], provider)
    return added(kind(**given), handle)


def sentence_trainer(provider, folder, tiny_models):
    kind, given = sentences(folder, tiny_models)
    handle = attnreg.attach(given["model"][0].auto_model, provider)
    return kind(**given), handle


def in_sentence_transformers(provider, folder, tiny_models):
    trainer, handle = sentence_trainer(provider, folder, tiny_models)
    handle, train, evaluate = added(trainer, handle)
    return handle, train, lambda: (evaluate(), trainer.model.encode(WORDS))


def in_setfit(provider, folder, tiny_models):
    setfit = pytest.importorskip("setfit", reason=EXTRA)
    model = setfit.SetFitModel.from_pretrained(str(tiny_models / "bert"))
    options = {"num_epochs": 2, "batch_size": 4, "logging_steps": 1, "max_steps": 4, "report_to": "none"}
    rows = Dataset.from_dict({"text": WORDS, "label": [0, 1, 0, 1]})
    trainer = setfit.Trainer(model, setfit.TrainingArguments(str(folder), **options), train_dataset=rows)
    callback = AttnRegCallback(provider)
    with pytest.raises(ValueError, match=r"Expected a transformers Trainer, got a Trainer from setfit.trainer. Pass"):
        callback.add_to(trainer)
    callback.add_to(trainer.st_trainer)

    def train():
        trainer.train()
        logs = [log for log in trainer.st_trainer.state.log_history if "embedding_loss" in log]
        assert all(log["drop_rate/encoder.0"] >= 0 for log in logs)
        assert len(logs) == 4

    return callback.handle, train, lambda: model.predict(WORDS)


def in_lightning(provider, folder, tiny_models):
    lightning = pytest.importorskip("lightning", reason=EXTRA)

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.bert = bert()
            self.handle = attnreg.attach(self.bert, provider)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_epoch_start(self):
            self.handle.provider.on_epoch(self.current_epoch)

        def training_step(self, batch, index):
            return self.bert(**batch).loss

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            self.handle.step()

        def validation_step(self, batch, index):
            self.bert(**batch)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["provider"] = self.handle.provider.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.handle.provider.load_state_dict(checkpoint["provider"])

    options = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    options |= {"max_epochs": 2, "accumulate_grad_batches": 2, "accelerator": "cpu", "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(**options)
    module, rows = Classifier(), DataLoader(Rows(), batch_size=4)

    def train():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        trainer.fit(module, rows, rows)
        assert trainer.global_step == 4
        trainer.save_checkpoint(folder / "classifier.ckpt")
        provider.steps.zero_()
        trainer.validate(module, rows, ckpt_path=folder / "classifier.ckpt", weights_only=True, verbose=False)

    return module.handle, train, lambda: trainer.validate(module, rows, verbose=False)


def in_accelerate(provider, folder, tiny_models):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = bert()
    handle = attnreg.attach(model, provider)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=4))

    def train():
        for epoch in range(2):
            provider.on_epoch(epoch)
            model.train()
            for batch in rows:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    handle.step()

    return handle, train, lambda: [model.eval()(**batch) for batch in rows]


def in_peft(provider, folder, tiny_models):
    model = bert()
    handle = attnreg.attach(model, provider)  # before; test_integrations.py attaches after
    model = peft.get_peft_model(model, peft.LoraConfig(peft.TaskType.SEQ_CLS, r=2, target_modules=["query"]))
    options = arguments(folder, gradient_accumulation_steps=2)
    trainer = hf.Trainer(model, options, train_dataset=Rows(), eval_dataset=Rows())
    handle, train, evaluate = added(trainer, handle)

    def merge():
        evaluate()
        handle.detach()
        assert not attnreg.is_attached(model.merge_and_unload())

    return handle, train, merge


BY_DEV = [in_trainer, in_seq2seq_trainer, in_accelerate, in_peft]
BY_EXTRA = [in_sft_trainer, in_dpo_trainer, in_sentence_transformers, in_setfit, in_lightning]


@pytest.mark.parametrize("start", [*BY_DEV, *(pytest.param(each, marks=pytest.mark.slow) for each in BY_EXTRA)])
def test_masks_in_training_and_a_step_for_each_step(tmp_path, tiny_models, start):
    provider = Spied()
    handle, train, evaluate = start(provider, tmp_path, tiny_models)
    train()
    asked, rates = provider.masks, handle.drop_rates()
    assert asked > 0
    assert sum(rates.values()) > 0
    assert int(provider.steps) == 4  # of eight batches, but for SetFit's four
    assert provider.epochs == [0, 1]
    evaluate()
    assert provider.masks == asked


@pytest.mark.slow
def test_a_provider_that_looks_at_batches_is_refused_in_sentence_transformers(tmp_path, tiny_models):
    trainer, handle = sentence_trainer(attnreg.AttributionProvider(), tmp_path, tiny_models)
    says = r"AttributionProvider looks .*, which SentenceTransformerTrainer does not support. Use `class Both\(RegularizedTrainer, SentenceTransformerTrainer\)`"
    with pytest.raises(ValueError, match=says):
        AttnRegCallback(handle).add_to(trainer)


BLOCKS = {  # the model and the package that each needs
    "one_line.py": ("llama", "trl"),
    "grpo.py": ("llama", "trl"),
    "classifier.py": (None, "lightning"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_run(warm, tmp_path, tiny_models, name):
    model, package = BLOCKS[name]
    pytest.importorskip(package, reason=EXTRA)
    args = [] if model is None else [tiny_models / model]
    page = "preferences.md" if name == "grpo.py" else "trainer.md"
    output = run_script(warm, ROOT / "docs" / page, name, *args, cwd=tmp_path)
    assert "attnreg" not in output, output  # no warning of ours
    if args:
        assert "drop_rate/" in output


def test_all_named_blocks_are_run():
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("trainer.md", "preferences.md"))
    named = re.findall(r"^```python (\S+)$", pages, re.M)
    assert set(named) == {*BLOCKS, "rte.py", "sharded.py"}


@pytest.mark.slow
def test_the_recipe_of_setfit(cli, tmp_path, tiny_models):
    """States of a class come closer; the head is that of a linear probe on them; a saved run scores the same."""
    pytest.importorskip("setfit", reason=EXTRA)
    (tmp_path / "data").mkdir()
    for split, count in (("train", 24), ("validation", 8)):
        rows = [{"text": WORDS[i % 2] + " " + WORDS[i % 4], "label": i % 2} for i in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--task", "custom", "--data-dir", "data", "--text-columns", "text", "--label-column", "label"]
    options = [*data, "--model", tiny_models / "bert", "--device", "cpu", "--learning-rate", 1e-3]
    ran(cli("recipe", "set-fit", "--pairs", 20, "--pooling", "mean", *options, "--output-dir", "mine"))
    result = json.loads((tmp_path / "mine/result.json").read_text())
    assert result["dev"]["accuracy"] == 1.0
    assert result["training_seconds"] > 0
    ran(cli("evaluate", "mine", "--device", "cpu"))
    states = {}
    for name, folder in (("before", tiny_models / "bert"), ("after", tmp_path / "mine/model")):
        body = hf.AutoModel.from_pretrained(folder).eval().requires_grad_(False)
        tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        a, b, c = (body(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean((0, 1)) for text in WORDS[:3])
        states[name] = float(torch.cosine_similarity(a, c, dim=0) - torch.cosine_similarity(a, b, dim=0))
    assert states["after"] > states["before"] + 0.1
    mean = [*options, "--pooling", "mean"]
    for given, code, says in (
        ([*mean, "--schedule", "cosine", "--label-smoothing", 0.1], 2, "does, without --schedule, --loss-function"),
        ([*mean, "--shots", 1], 1, "needs at least two classes, of two rows or more"),
        ([*options, "--pooling", "own"], 2, "needs a pretrained --model, with --pooling mean, cls or last"),
        ([], 2, "set-fit needs a pretrained --model"),
    ):
        assert_sentence(cli("recipe", "set-fit", *given, "--output-dir", "other"), code, says)
