"""What is explained, of every kind of head."""

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.attribution import Target, explain
from attnreg.errors import InputError
from tests.cases import MODELS
from tests.test_attribution import BATCH, LABELS, attached, bert

CLASSES = torch.tensor([1, 0])
TOKENS = torch.tensor([[1, -100, 2, 0, 2], [0, 1, -100, -100, -100]])
HEADS = {
    "classification": (bert, {}, lambda z, b: z.max(-1).values.sum()),
    "gold label": (bert, {"labels": CLASSES}, lambda z, b: z[0, 1] + z[1, 0]),
    "regression": (lambda: bert(num_labels=1), {"labels": torch.tensor([0.5, -1.0]).double()}, lambda z, b: -((z[:, 0] - b["labels"]) ** 2).sum()),
    "token classification": (
        lambda: bert(hf.BertForTokenClassification, num_labels=3),
        {"labels": TOKENS},
        lambda z, b: z.log_softmax(-1).max(-1).values[b["labels"] != -100].sum(),
    ),
    "token classification without labels": (
        lambda: bert(hf.BertForTokenClassification, num_labels=3),
        {},
        lambda z, b: z.log_softmax(-1).max(-1).values[b["attention_mask"] == 1].sum(),
    ),
    "gold tokens": (
        lambda: bert(hf.BertForTokenClassification, num_labels=3),
        {"labels": TOKENS},
        lambda z, b: sum(z.log_softmax(-1)[i, j, TOKENS[i, j]] for i, j in (TOKENS != -100).nonzero()),
    ),
    "a function": (bert, {}, lambda z, b: z[:, 0].sum()),
}  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_what_is_explained(head):
    make, labels, score = HEADS[head]
    target = {"gold label": "label", "gold tokens": "label", "a function": lambda out, batch: out.logits[:, 0]}
    model, batch = make().eval(), {**BATCH, **labels}
    model.set_attn_implementation("eager")
    out = model(**BATCH, output_attentions=True)
    expected = torch.autograd.grad(score(out.logits, batch), out.attentions)
    with attached(model) as handle:
        got = explain(model, batch, handle, LABELS, target=Target(target.get(head, "predicted")))
        scaled = explain(
            model, batch, handle, LABELS, target=Target(target.get(head, "predicted")), method="integrated_gradients"
        )
    for label, gradient in zip(LABELS, expected, strict=True):
        assert (got[label] - gradient).abs().max() < 1e-12
        assert gradient.abs().max() > 1e-6
        assert scaled[label].isfinite().all()


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients"])
def test_multiple_choice(method):
    model = bert(hf.BertForMultipleChoice).eval()
    batch = {name: torch.stack([tensor, tensor.flip(0)], 1) for name, tensor in BATCH.items()}
    with attached(model) as handle:
        got = explain(model, batch, handle, LABELS, method=method, steps=4)
    model.set_attn_implementation("eager")
    out = model(**batch, output_attentions=True)
    if method == "gradient":
        expected = torch.autograd.grad(out.logits.max(-1).values.sum(), out.attentions)
        assert all((got[k] - e).abs().max() < 1e-12 for k, e in zip(LABELS, expected, strict=True))
    assert got["encoder.0"].shape == (4, 4, 5, 5)


def test_sequence_to_sequence():
    case = next(c for c in MODELS if c.name == "marian")
    model = case.build().double().eval()
    model.set_attn_implementation("eager")
    ids = case.batch()
    batch = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
    labels = ids["decoder_input_ids"].masked_fill(torch.arange(5) > torch.tensor([[4], [2], [3]]), -100)
    out = model(**batch, labels=labels, output_attentions=True)
    expected = torch.autograd.grad(
        out.logits.log_softmax(-1).max(-1).values[labels != -100].sum(),
        (*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions),
    )
    names = [f"{stack}.{i}" for stack in ("encoder", "decoder", "cross") for i in range(2)]
    with attnreg.attach(model, attnreg.AttributionProvider(), stacks=["encoder", "decoder", "cross"]) as handle:
        got = explain(model, {**batch, "labels": labels}, handle, names)
    assert all((got[name] - e).abs().max() < 1e-12 for name, e in zip(names, expected, strict=True))


def test_a_causal_language_model_predicts_the_next_token():
    model = next(case for case in MODELS if case.name == "gpt2").build().double().eval()
    model.set_attn_implementation("eager")
    ids = BATCH["input_ids"]
    out = model(ids, output_attentions=True)
    log_probs = out.logits.log_softmax(-1)
    score = sum(log_probs[b, i, ids[b, i + 1]] for b in range(2) for i in range(4))
    assert float(score.detach()) == pytest.approx(-8 * float(model(ids, labels=ids).loss.detach()), rel=1e-6)
    expected = torch.autograd.grad(score, out.attentions)
    with attached(model) as handle:
        labels = [site.label for site in handle.sites]
        got = explain(model, {"input_ids": ids, "labels": ids}, handle, labels, target=Target("label"))
    assert all((got[label] - e).abs().max() < 1e-12 for label, e in zip(labels, expected, strict=True))


def test_a_multi_label_classifier_needs_a_function():
    model = bert(problem_type="multi_label_classification")
    says = "A multi-label classifier has no single class to explain"
    with attnreg.attach(model, attnreg.DropKey(0.1)) as handle, pytest.raises(InputError, match=says):
        explain(model, BATCH, handle, LABELS)
    with pytest.raises(InputError, match=says):  # before training, although cross-tuning begins with a plain epoch
        attnreg.attach(model, attnreg.CrossTuning(attnreg.AttributionProvider()))
    attnreg.attach(model, attnreg.AttributionProvider(method="random") & attnreg.AttributionProvider(target=len))


@pytest.mark.parametrize(
    ("head", "batch", "message"),
    [
        (hf.BertModel, {}, "The model's output, .*, has no `logits` of shape"),
        (lambda c: hf.BertForSequenceClassification(c), {}, None),
    ],
)
def test_outputs_that_cannot_be_explained(head, batch, message):
    model = bert(head)
    provider = attnreg.AttributionProvider()
    with attnreg.attach(model, provider):
        if message is None:
            provider.attribute(model, BATCH)
        else:
            with pytest.raises(ValueError, match=message):
                provider.attribute(model, {**BATCH, **batch})


def test_labels_that_are_needed():
    model = bert()
    provider = attnreg.AttributionProvider(target="label")
    with attnreg.attach(model, provider), pytest.raises(ValueError, match="The batch has no labels, got"):
        provider.attribute(model, BATCH)
    model = bert(num_labels=1)
    with (
        attnreg.attach(model, attnreg.AttributionProvider()) as handle,
        pytest.raises(ValueError, match="The batch has no labels, got"),
    ):
        handle.provider.attribute(model, BATCH)


class MyLlama(hf.LlamaForCausalLM):
    """A subclass, as people make them."""


def llama(cls=MyLlama, **options):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **options
    )
    return cls(config).double()


def encoder_decoder():
    torch.manual_seed(0)
    small = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    decoder = hf.BertLMHeadModel(hf.BertConfig(**small, is_decoder=True, add_cross_attention=True))
    model = hf.EncoderDecoderModel(encoder=hf.BertModel(hf.BertConfig(**small)), decoder=decoder)
    model.config.decoder_start_token_id = model.config.pad_token_id = 0
    return model.double()


def wrapped():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = llama()

        def forward(self, input_ids, labels=None):
            return self.inner(input_ids=input_ids, labels=labels)

    return Wrapper()


SHIFTED = {MyLlama.__name__: (llama, True), "wrapper": (wrapped, True), "EncoderDecoderModel": (encoder_decoder, False)}


@pytest.mark.filterwarnings(
    "ignore:Version v4.12.0 introduces a better way:FutureWarning"
)  # of transformers, each time
@pytest.mark.parametrize("name", SHIFTED)
def test_labels_are_moved_where_the_models_own_loss_moves_them(name):
    make, shifted = SHIFTED[name]
    model = make().eval()
    ids = torch.randint(1, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :2] = labels[1, 4:] = -100
    batch = {"input_ids": ids, "labels": labels}
    logits = model(**batch).logits
    where = labels[:, 1:] != -100 if shifted else labels != -100
    best = logits.log_softmax(-1).max(-1).values
    expected = (best[:, :-1] if shifted else best)[where].sum()
    target = Target("predicted").for_model(model)
    output = model(**batch)
    assert torch.allclose(target.score(output, batch, target.classes(output, batch)), expected.reshape(1), atol=1e-9)
    assert target.shifts_labels is shifted
    # By its class, where the loss is not to be had.
    output = {"logits": output.logits}
    assert Target("label").for_model(model).classes(output, batch)[1, 3] == (labels[1, 4] if shifted else labels[1, 3])


def test_a_loss_with_something_else_in_it_does_not_decide():
    model = llama().eval()
    ids = torch.randint(1, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids, labels=ids)
    output.loss = output.loss + 0.5
    target = Target("label").for_model(model)
    assert torch.equal(target.classes(output, {"labels": ids})[:, :-1], ids[:, 1:])
    assert target.shifts_labels is True
