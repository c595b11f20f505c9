"""A provider and one argument: regularizers of hidden states on LoRA decoders, in the trainers people use."""

import copy
import itertools

import peft
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.integrations import AttnRegCallback, RegularizedTrainer
from attnreg.training import RDropLoss
from tests.test_integrations import Rows, arguments, bert, column, weights
from tests.test_integrations_learned import Sentences
from tests.test_trainers import EXTRA, WORDS, of_trl
from tests.test_trainers import models as models

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]
LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LABELS = ["decoder.0", "decoder.1", "decoder.0.output", "decoder.1.output"]
HIDDEN = [
    attnreg.HiddenKey(0.3),
    attnreg.HiddenDropout(0.3, mode="span"),
    attnreg.EmbeddingNoise(),
    attnreg.HiddenNoise(),
    attnreg.RelaxedAttention(),
]


def llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))


def with_lora(model):
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(peft.TaskType.CAUSAL_LM, **options))


@pytest.mark.parametrize("provider", HIDDEN, ids=lambda provider: type(provider).__name__)
def test_one_argument_of_the_stock_trainer(tmp_path, provider):
    provider = copy.deepcopy(provider)
    model = with_lora(llama())
    callback = AttnRegCallback(provider)
    with pytest.raises(ValueError, match=r"is not attached yet\. Pass the callback to a Trainer as"):
        _ = callback.handle
    trainer = hf.Trainer(model, arguments(tmp_path), train_dataset=Sentences(), callbacks=[callback])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer.train()
    rates = column(trainer, f"drop_rate/{callback.handle.sites[0].label}")
    assert len(rates) == 8
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    callback.handle.detach()


def test_the_callback_acts_once_and_is_seen_by_reporters(tmp_path):
    provider = attnreg.BernoulliScheduleProvider([(0, 0.3), (1, 0)], total_steps=8)
    callback = AttnRegCallback(provider)
    trainer = hf.Trainer(bert(), arguments(tmp_path), train_dataset=Rows(), callbacks=[callback])
    callback.add_to(trainer)
    assert trainer.callback_handler.callbacks[0] is callback
    trainer.train()
    assert int(provider.steps) == 8


def test_one_argument_is_the_same_as_attaching(tmp_path):
    ends = []
    for attached in (False, True):
        model, provider = with_lora(llama()), attnreg.HiddenKey(0.3)
        given = attnreg.attach(model, provider) if attached else provider
        callbacks = [AttnRegCallback(given)]
        hf.Trainer(model, arguments(tmp_path), train_dataset=Sentences(), callbacks=callbacks).train()
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_what_a_callback_cannot_do_is_refused(tmp_path):
    for provider, why in {
        attnreg.AttentionEntropy(): r"AttentionEntropy adds to the loss \(`penalty`\)",
        attnreg.AttributionProvider(): "AttributionProvider looks at each batch",
    }.items():
        model = bert()
        says = rf"{why}.*, which a callback does not support\. Use `RegularizedTrainer\(provider=\.\.\.\)`"
        with pytest.raises(ValueError, match=says):
            hf.Trainer(model, arguments(tmp_path), callbacks=[AttnRegCallback(provider)])
        assert not attnreg.is_attached(model)
    with pytest.raises(ValueError, match=r"Expected a provider or a handle of `attnreg\.attach`, got the text"):
        AttnRegCallback("DropKey(0.1)")


def test_several_models_in_one_are_refused(tmp_path):
    two = torch.nn.ModuleDict({"query": bert(), "document": bert()})
    with pytest.raises(ValueError, match=r"ModuleDict contains 2 models: query, document\. Attach"):
        hf.Trainer(two, arguments(tmp_path), callbacks=[AttnRegCallback(attnreg.DropKey())])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_entropy_is_part_of_the_loss(tmp_path, accumulated):
    losses = []
    for alpha in (0.0, 0.5):
        provider = attnreg.AttentionEntropy(alpha)
        options = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
        trainer = RegularizedTrainer(
            llama(), arguments(tmp_path, max_steps=1, **options), train_dataset=Sentences(), provider=provider
        )
        trainer.train()
        losses.append(column(trainer, "loss")[0])
    # Two layers; attention is nearly uniform over 1 to 6 keys.
    entropy = 2 * sum(torch.tensor(keys).log() for keys in range(1, 7)) / 6
    assert losses[0] - losses[1] == pytest.approx(0.5 * float(entropy), rel=0.05)


@pytest.mark.parametrize("first", ["attach", "peft"])
def test_lora_gradients_replay_saving_and_merging(tmp_path, first):
    base, batch = llama(), {"input_ids": Rows().ids[:4], "labels": Rows().ids[:4]}
    provider = attnreg.HiddenKey(0.4)
    if first == "attach":
        handle = attnreg.attach(base, provider)
        model = with_lora(base)
    else:
        model = with_lora(base)
        handle = attnreg.attach(model, provider)
    assert [site.label for site in handle.sites] == LABELS
    output = model.train()(**batch)
    output.loss.backward()
    rates = handle.drop_rates()
    assert all(rates[label] > 0.1 for label in LABELS)
    found = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found == {name for name, _ in model.named_parameters() if "lora_" in name}
    with torch.no_grad(), handle.replay():
        assert torch.equal(model(**batch).logits, output.logits)
    plain = model.eval()(**batch).logits
    assert not torch.allclose(plain, output.logits)
    handle.step()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    assert torch.equal(loaded(**batch).logits, plain)
    handle.detach()
    merged = model.merge_and_unload()
    assert not attnreg.is_attached(merged)
    assert torch.allclose(merged(**batch).logits, plain, atol=1e-5)


@torch.no_grad()
def by_hand(model, batch, alpha, seed):
    """R-Drop's loss for a decoder, one labelled position at a time."""
    torch.manual_seed(seed)
    with torch.enable_grad():  # masks need it
        one, two = (model(**batch) for _ in range(2))
    a, b = one.logits.double(), two.logits.double()
    terms = []
    for row, labels in enumerate(batch["labels"]):
        for position in range(1, len(labels)):
            if labels[position] != -100:
                p, q = a[row, position - 1].softmax(-1), b[row, position - 1].softmax(-1)
                terms.append(((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2)
    return float((one.loss + two.loss + alpha * sum(terms) / len(terms)) / 2)


def test_r_drop_is_its_formula(tmp_path):
    model = with_lora(llama())
    labels = Rows().ids[:4].clone()
    labels[:, :2] = -100
    batch = {"input_ids": Rows().ids[:4], "labels": labels}
    trainer = RegularizedTrainer(
        model, arguments(tmp_path), objective=RDropLoss(3.0), callbacks=[AttnRegCallback(attnreg.HiddenKey(0.3))]
    )
    model.train()
    expected = by_hand(model, batch, 3.0, seed=5)
    torch.manual_seed(5)
    found = float(trainer.compute_loss(model, batch).detach())
    assert found == pytest.approx(expected, rel=1e-5)
    assert found > by_hand(model, batch, 0.0, seed=5) + 1e-3
    model.eval()
    assert torch.equal(trainer.compute_loss(model, batch), model(**batch).loss)


@pytest.mark.parametrize("counted", [False, True])
def test_r_drop_under_gradient_accumulation(tmp_path, counted):
    found = []
    for accumulated in (1, 4):
        model, passes = llama(), itertools.count()
        if counted:
            model.accepts_loss_kwargs = True
        # Every second pass predicts something else, without chance.
        model.lm_head.register_forward_hook(lambda module, args, logits, n=passes: logits * (1 + 9 * (next(n) % 2)))
        options = {"per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
        options |= {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0}
        trainer = RegularizedTrainer(
            model, arguments(tmp_path, **options), objective=RDropLoss(100.0), train_dataset=Sentences()
        )
        trainer.train()
        found.append((column(trainer, "loss")[0], weights(model)))
    assert found[0][0] > 4.5  # 3.8 of it is cross-entropy
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)
    assert not torch.allclose(found[0][1], weights(llama()), atol=1e-4)


def test_r_drop_with_a_penalty_and_what_it_refuses(tmp_path):
    losses = []
    for alpha in (0.0, 0.5):
        trainer = RegularizedTrainer(
            llama(),
            arguments(tmp_path, max_steps=1),
            train_dataset=Sentences(),
            provider=attnreg.AttentionEntropy(alpha),
            objective=RDropLoss(),
        )
        trainer.train()
        losses.append(column(trainer, "loss")[0])
    assert losses[1] < losses[0] - 0.5  # the entropy of two layers, once
    assert losses[1] > losses[0] - 1.5
    model, options = bert(), {"objective": RDropLoss(), "compute_loss_func": lambda *_, **__: torch.zeros(())}
    with pytest.raises(ValueError, match="The batch has no labels, got input_ids"):
        RegularizedTrainer(model, arguments(tmp_path), **options).compute_loss(
            model.train(), {"input_ids": Rows().ids[:2]}
        )


def in_sft(folder, models, callback, **options):
    """An SFTTrainer, on top of which options of a RegularizedTrainer act."""
    trl = pytest.importorskip("trl", reason=EXTRA)
    from datasets import Dataset

    model = hf.AutoModelForCausalLM.from_pretrained(models / "llama")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    rows = Dataset.from_dict({"text": WORDS * 4})
    kind = type("Both", (RegularizedTrainer, trl.SFTTrainer), {}) if options else trl.SFTTrainer
    options |= {"train_dataset": rows, "peft_config": lora, "callbacks": [callback]}
    return kind(model, of_trl(trl.SFTConfig, folder), **options)


@pytest.mark.slow
def test_one_argument_of_sft(tmp_path, models):
    callback = AttnRegCallback(attnreg.HiddenKey(0.3))
    trainer = in_sft(tmp_path, models, callback)
    trainer.train()
    assert [site.label for site in callback.handle.sites] == LABELS
    for label in LABELS:
        assert len(column(trainer, f"drop_rate/{label}")) == 4
        assert max(column(trainer, f"drop_rate/{label}")) > 0
    callback.handle.detach()
    assert not attnreg.is_attached(trainer.model.merge_and_unload())


@pytest.mark.slow
def test_entropy_in_sft(tmp_path, models):
    losses = []
    for alpha in (0.0, 0.5):
        trainer = in_sft(tmp_path, models, hf.TrainerCallback(), provider=attnreg.AttentionEntropy(alpha))
        trainer.train()
        losses.append(column(trainer, "loss")[0])
    assert losses[1] < losses[0] - 0.1


@pytest.mark.slow
def test_r_drop_is_refused_in_sft(tmp_path, models):
    trainer = in_sft(tmp_path, models, AttnRegCallback(attnreg.HiddenKey(0.3)), objective=RDropLoss())
    with pytest.raises(ValueError, match=r"R-Drop needs `logits` in the output of \w+, with gradients, but found none"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_one_argument_of_sentence_transformers(tmp_path, models, adapter):
    st = pytest.importorskip("sentence_transformers", reason=EXTRA)
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = st.SentenceTransformer(str(models / "llama"))
    if adapter:
        model.add_adapter(peft.LoraConfig(peft.TaskType.FEATURE_EXTRACTION, r=2, target_modules=["q_proj"]))
    callback = AttnRegCallback(attnreg.HiddenKey(0.3))
    trainer = st.SentenceTransformerTrainer(
        model,
        arguments(tmp_path, st.SentenceTransformerTrainingArguments),
        train_dataset=Dataset.from_dict({"anchor": WORDS * 4, "positive": WORDS * 4}),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[callback],
    )
    trainer.train()
    assert [site.label for site in callback.handle.sites] == LABELS
    assert max(column(trainer, "drop_rate/decoder.0.output")) > 0.1


@pytest.mark.slow
def test_one_argument_of_setfit(tmp_path, models):
    setfit = pytest.importorskip("setfit", reason=EXTRA)
    from datasets import Dataset

    callback = AttnRegCallback(attnreg.HiddenKey(0.3))
    trainer = setfit.Trainer(
        setfit.SetFitModel.from_pretrained(str(models / "bert")),
        setfit.TrainingArguments(
            str(tmp_path), num_epochs=1, batch_size=4, logging_steps=1, max_steps=2, report_to="none"
        ),
        train_dataset=Dataset.from_dict({"text": WORDS, "label": [0, 1, 0, 1]}),
    )
    callback.add_to(trainer.st_trainer)
    trainer.train()
    assert max(callback.handle.drop_rates().values()) > 0.1
