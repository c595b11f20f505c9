"""A provider and one argument: regularizers of hidden states on LoRA decoders, in the trainers people use."""

import copy

import peft
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.integrations import AttnRegCallback
from tests.helpers.cases import model_case, sample
from tests.helpers.method_cases import weights
from tests.helpers.trainers import QUIET, Rows, Sentences, arguments, bert, column, sentences

pytestmark = QUIET
llama = model_case("llama").build
LABELS = ["decoder.0", "decoder.1", "decoder.0.output", "decoder.1.output"]
HIDDEN = [
    attnreg.HiddenKey(0.3),
    attnreg.HiddenDropout(0.3, mode="span"),
    attnreg.EmbeddingNoise(),
    attnreg.HiddenNoise(),
    attnreg.RelaxedAttention(),
]


def with_lora(model):
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(peft.TaskType.CAUSAL_LM, **options))


@pytest.mark.parametrize("provider", sample(HIDDEN, lambda provider: isinstance(provider, (attnreg.HiddenKey, attnreg.RelaxedAttention))), ids=lambda provider: type(provider).__name__)  # fmt: skip
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
        attnreg.AttributionProvider(): "AttributionProvider looks at a batch",
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


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_one_argument_of_sentence_transformers(tmp_path, tiny_models, adapter):
    kind, given = sentences(tmp_path, tiny_models, "llama")
    if adapter:
        given["model"].add_adapter(peft.LoraConfig(peft.TaskType.FEATURE_EXTRACTION, r=2, target_modules=["q_proj"]))
    callback = AttnRegCallback(attnreg.HiddenKey(0.3))
    trainer = kind(**given, callbacks=[callback])
    trainer.train()
    assert [site.label for site in callback.handle.sites] == LABELS
    assert max(column(trainer, "drop_rate/decoder.0.output")) > 0.1
