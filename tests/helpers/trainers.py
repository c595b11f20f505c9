"""Small models, rows and arguments for Trainers."""

import pytest
import torch
import transformers as hf
from torch.utils.data import Dataset

from attnreg.integrations import RegularizedTrainer
from tests.helpers.cases import SMALL, TEXT

# What trl, peft and sentence-transformers do on a CPU and with the latest transformers; ours are UserWarnings.
QUIET = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]


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
    usual = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    usual |= {"lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none"}
    return cls(str(folder), **{**usual, "disable_tqdm": True, "use_cpu": True, **options})


def regularized(folder, provider, model=None, rows=None, kind=RegularizedTrainer, **options):
    """A trainer of a provider, with options of its arguments."""
    model, rows = bert() if model is None else model, rows or Rows()
    return kind(model, arguments(folder, **options), train_dataset=rows, provider=provider)


def column(trainer, name):
    return [record[name] for record in trainer.state.log_history if name in record]


class Gradients(hf.TrainerCallback):
    """Keeps a parameter's gradient at each optimizer step."""

    def __init__(self, *parameters):
        self.parameters = parameters
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seen.append([None if p.grad is None else p.grad.item() for p in self.parameters])


class Sentences(Rows):
    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


EXTRA = 'needs the trainers: pip install -e ".[trainers]"'
WORDS = ["red green blue", "blue red green red", "green", "red blue"]


def of_trl(kind, folder, **options):
    options = {"gradient_accumulation_steps": 2, "bf16": False, **options}
    return arguments(folder, kind, **options)
