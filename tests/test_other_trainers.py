"""RegularizedTrainer on top of other Trainers: every kind of regularizer acts in each of them, or is refused."""

import pytest
import torch
import transformers as hf
from datasets import Dataset

import attnreg
from attnreg.errors import InputError
from attnreg.integrations import RegularizedTrainer
from tests.helpers.cases import MODELS
from tests.helpers.method_cases import weights
from tests.helpers.trainer_cases import KINDS, made
from tests.helpers.trainers import EXTRA, QUIET, WORDS, Rows, arguments

pytestmark = QUIET
OPTIONS = {"max_steps": 4, "gradient_accumulation_steps": 2}


def seq2seq(folder, tiny_models):
    torch.manual_seed(0)
    model = next(case for case in MODELS if case.name == "bart").build()
    given = arguments(folder, hf.Seq2SeqTrainingArguments, **OPTIONS)
    return hf.Seq2SeqTrainer, {"model": model, "args": given, "train_dataset": Rows(pair=True)}


def sft(folder, tiny_models):
    trl = pytest.importorskip("trl", reason=EXTRA)
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_models / "llama")
    given = arguments(folder, trl.SFTConfig, bf16=False, **OPTIONS)
    return trl.SFTTrainer, {"model": model, "args": given, "train_dataset": Dataset.from_dict({"text": WORDS * 4})}


def dpo(folder, tiny_models):
    trl = pytest.importorskip("trl", reason=EXTRA)
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_models / "llama")
    rows = Dataset.from_dict({"prompt": ["red"] * 16, "chosen": [" green"] * 16, "rejected": [" blue red"] * 16})
    given = arguments(folder, trl.DPOConfig, bf16=False, **OPTIONS)
    return trl.DPOTrainer, {"model": model, "args": given, "train_dataset": rows}


def sentences(folder, tiny_models):
    st = pytest.importorskip("sentence_transformers", reason=EXTRA)
    from sentence_transformers.sentence_transformer import losses

    model = st.SentenceTransformer(str(tiny_models / "bert"))
    rows = Dataset.from_dict({"anchor": WORDS * 4, "positive": WORDS * 4})
    given = arguments(folder, st.SentenceTransformerTrainingArguments, **OPTIONS)
    loss = losses.MultipleNegativesRankingLoss(model)
    return st.SentenceTransformerTrainer, {"model": model, "args": given, "train_dataset": rows, "loss": loss}


REFUSED = {
    ("sft", "objective"): "R-Drop needs `logits` with gradients in the output of LlamaForCausalLM, which has none",
    ("sentences", "objective"): "R-Drop needs `logits` in the output of SentenceTransformer",
    (
        "sentences",
        "two passes",
    ): r"Expected the batch to be a dict of arguments of SentenceTransformer.forward\(input\)",
    ("dpo", "objective"): "R-Drop needs `logits`",
}


@pytest.mark.slow
@pytest.mark.parametrize("start", [seq2seq, sft, dpo, sentences])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_acts_or_is_refused(tmp_path, tiny_models, start, kind):
    base, given = start(tmp_path, tiny_models)
    plain = base(**given)
    plain.train()
    base, given = start(tmp_path, tiny_models)
    both = type("Both", (RegularizedTrainer, base), {})
    options = made(kind)
    if (start.__name__, kind) in REFUSED:
        with pytest.raises((InputError, RuntimeError), match=REFUSED[start.__name__, kind]):
            both(**given, **options).train()
        return
    if kind == "learned":
        model = given["model"][0].auto_model if start is sentences else given["model"]
        options["provider"] = attnreg.ConcreteDropout.for_model(model, 0.2)
    trainer = both(**given, **options)
    before = [each.detach().clone() for each in options["provider"].parameters()]
    trainer.train()
    assert not torch.equal(weights(trainer.model), weights(plain.model))
    assert not any(map(torch.equal, before, options["provider"].parameters()))
