"""Small models, rows and arguments for Trainers."""

import datasets
import pytest
import torch
import transformers as hf
from torch.utils.data import Dataset

from attnreg.integrations import RegularizedTrainer
from tests.helpers.cases import SMALL, TEXT, model_case

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


# The class of a Trainer, and what it takes.


def seq2seq(folder, tiny_models, **options):
    given = arguments(folder, hf.Seq2SeqTrainingArguments, gradient_accumulation_steps=2, **options)
    rows = {"train_dataset": Rows(pair=True), "eval_dataset": Rows(pair=True)}
    return hf.Seq2SeqTrainer, {"model": model_case("bart").build(), "args": given, **rows}


def sft(folder, tiny_models, **options):
    trl = pytest.importorskip("trl", reason=EXTRA)
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_models / "llama")
    rows = dict.fromkeys(["train_dataset", "eval_dataset"], datasets.Dataset.from_dict({"text": WORDS * 4}))
    return trl.SFTTrainer, {"model": model, "args": of_trl(trl.SFTConfig, folder, **options), **rows}


def dpo(folder, tiny_models, **options):
    trl = pytest.importorskip("trl", reason=EXTRA)
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_models / "llama")
    table = {"prompt": ["red"] * 16, "chosen": [" green"] * 16, "rejected": [" blue red"] * 16}
    rows = dict.fromkeys(["train_dataset", "eval_dataset"], datasets.Dataset.from_dict(table))
    return trl.DPOTrainer, {"model": model, "args": of_trl(trl.DPOConfig, folder, **options), **rows}


def sentences(folder, tiny_models, model="bert", **options):
    st = pytest.importorskip("sentence_transformers", reason=EXTRA)
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = st.SentenceTransformer(str(tiny_models / model))
    table = datasets.Dataset.from_dict({"anchor": WORDS * 4, "positive": WORDS * 4})
    rows = {"train_dataset": table, "eval_dataset": table, "loss": MultipleNegativesRankingLoss(model)}
    given = arguments(folder, st.SentenceTransformerTrainingArguments, gradient_accumulation_steps=2, **options)
    return st.SentenceTransformerTrainer, {"model": model, "args": given, **rows}
