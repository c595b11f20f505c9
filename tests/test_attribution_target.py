"""What is explained, of every kind of head."""

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.attribution import Target, explain
from attnreg.errors import InputError
from attnreg.outputs import labels_of
from tests.helpers.cases import SMALL, model_case
from tests.helpers.models import TEXTS as BATCH
from tests.helpers.models import bert_of_three_layers as bert

CLASSES = torch.tensor([1, 0])
TOKENS = torch.tensor([[1, -100, 2, 0, 2], [0, 1, -100, -100, -100]])
CHOICES = {name: torch.stack([tensor, tensor.flip(0)], 1) for name, tensor in BATCH.items()}
IDS = BATCH["input_ids"]
REGRESSION = {**BATCH, "labels": torch.tensor([0.5, -1.0]).double()}
TRANSLATION = {**BATCH, "labels": torch.tensor([[3, 4, 5], [6, 7, -100]])}


def tagger():
    return bert(hf.BertForTokenClassification, num_labels=3)


def of_cases(name):
    return lambda: model_case(name).build().double()


def best(logits):
    return logits.log_softmax(-1).max(-1).values


HEADS = {  # model, batch, target, and what is explained, by the logits z
    "classification": (bert, BATCH, "predicted", lambda z: z.max(-1).values),
    "gold label": (bert, {**BATCH, "labels": CLASSES}, "label", lambda z: z[0, 1] + z[1, 0]),
    "regression": (lambda: bert(num_labels=1), REGRESSION, "predicted", lambda z: -((z[:, 0] - REGRESSION["labels"]) ** 2)),
    "token classification": (tagger, {**BATCH, "labels": TOKENS}, "predicted", lambda z: best(z)[TOKENS != -100]),
    "token classification without labels": (tagger, BATCH, "predicted", lambda z: best(z)[BATCH["attention_mask"] == 1]),
    "gold tokens": (tagger, {**BATCH, "labels": TOKENS}, "label", lambda z: sum(z.log_softmax(-1)[i, j, TOKENS[i, j]] for i, j in (TOKENS != -100).nonzero())),
    "a function": (bert, BATCH, lambda out, batch: out.logits[:, 0], lambda z: z[:, 0]),
    "multiple choice": (lambda: bert(hf.BertForMultipleChoice), CHOICES, "predicted", lambda z: z.max(-1).values),
    "sequence to sequence": (of_cases("marian"), TRANSLATION, "predicted", lambda z: best(z)[TRANSLATION["labels"] != -100]),
    "next token": (of_cases("gpt2"), {"input_ids": IDS, "labels": IDS}, "label", lambda z: sum(z.log_softmax(-1)[b, i, IDS[b, i + 1]] for b in range(2) for i in range(4))),
}  # fmt: skip


def test_soft_labels_are_of_classes():
    logits, soft = torch.tensor([[1.0, 3.0, 2.0], [2.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.2, 0.6], [0.9, 0.1, 0.0]])
    for kind, classes in {"predicted": [1, 0], "label": [2, 0]}.items():
        target, batch = Target(kind), {"labels": soft}
        assert target.classes(logits, batch).tolist() == classes
        assert target.score(logits, batch, torch.tensor(classes)).item() == sum(map(float, logits[[0, 1], classes]))
    assert Target().classes(logits, {"labels": 2 * soft}) is None  # numbers


@pytest.mark.parametrize("head", HEADS)
def test_what_is_explained(head):
    make, batch, target, score = HEADS[head]
    model = make().eval()
    model.set_attn_implementation("eager")
    out = model(**batch, output_attentions=True)
    stacks = {stack: out.get(f"{stack}_attentions") for stack in ("encoder", "decoder", "cross")}
    if not any(stacks.values()):
        stacks = {"decoder" if head == "next token" else "encoder": out.attentions}
    weights = {f"{stack}.{i}": a for stack, of_layers in stacks.items() for i, a in enumerate(of_layers)}
    expected = torch.autograd.grad(score(out.logits).sum(), [*weights.values()])
    if head == "next token":
        assert float(score(out.logits.detach())) == pytest.approx(-8 * float(out.loss.detach()), rel=1e-6)
    with attnreg.attach(model, attnreg.AttributionProvider(), stacks=[*stacks]) as handle:
        options = {"handle": handle, "labels": [*weights], "target": Target(target), "steps": 4}
        got = explain(model, batch, **options)
        scaled = explain(model, batch, **options, method="integrated_gradients")
    for label, gradient in zip(weights, expected, strict=True):
        assert (got[label] - gradient).abs().max() < 1e-12
        assert gradient.abs().max() > (1e-7 if head == "sequence to sequence" else 1e-6)
        assert scaled[label].shape == gradient.shape
        assert scaled[label].isfinite().all()


@pytest.mark.parametrize(
    ("make", "target", "message"),
    [
        (lambda: bert(hf.BertModel), "predicted", "The model's output, .*, has no `logits` of shape"),
        (bert, "label", "The batch has no labels, got"),
        (lambda: bert(num_labels=1), "predicted", "The batch has no labels, got"),
    ],
)
def test_what_cannot_be_explained(make, target, message):
    model, provider = make(), attnreg.AttributionProvider(target=target)
    with attnreg.attach(model, provider), pytest.raises(ValueError, match=message):
        provider.attribute(model, BATCH)


class MyLlama(hf.LlamaForCausalLM):
    """A subclass, as people make them."""


ONE_LAYER = {**SMALL, "vocab_size": 40, "num_hidden_layers": 1}


def llama():
    torch.manual_seed(0)
    return MyLlama(hf.LlamaConfig(**ONE_LAYER)).double()


def encoder_decoder():
    torch.manual_seed(0)
    decoder = hf.BertLMHeadModel(hf.BertConfig(**ONE_LAYER, is_decoder=True, add_cross_attention=True))
    model = hf.EncoderDecoderModel(encoder=hf.BertModel(hf.BertConfig(**ONE_LAYER)), decoder=decoder)
    model.config.decoder_start_token_id = model.config.pad_token_id = 0
    return model.double()


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids, labels=None):
        return self.inner(input_ids=input_ids, labels=labels)


SHIFTED = {MyLlama.__name__: (llama, True), "wrapper": (Wrapper, True), "EncoderDecoderModel": (encoder_decoder, False)}


@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces a better way:FutureWarning")  # each time
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
    # By its class, where the loss is not to be had.
    model, output = make(), {"logits": output.logits}
    assert Target("label").for_model(model).classes(output, batch)[1, 3] == (labels[1, 4] if shifted else labels[1, 3])


def test_a_loss_with_something_else_in_it_does_not_decide():
    model = llama().eval()
    ids = torch.randint(1, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids, labels=ids)
    output.loss = output.loss + 0.5
    target = Target("label").for_model(model)
    assert torch.equal(target.classes(output, {"labels": ids})[:, :-1], ids[:, 1:])


def test_a_multi_label_classifier_is_refused_when_it_is_attached():
    """Not after the plain epoch with which cross-tuning begins."""
    model = bert(problem_type="multi_label_classification")
    with pytest.raises(InputError, match="A multi-label classifier has no single class to explain"):
        attnreg.attach(model, attnreg.CrossTuning(attnreg.AttributionProvider()))
    attnreg.attach(model, attnreg.AttributionProvider(method="random") & attnreg.AttributionProvider(target=len))


def test_one_that_only_its_first_batch_tells_is_refused_at_this_batch():
    model, provider = bert(num_labels=3), attnreg.AttributionProvider()
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.tensor([[1.0, 0, 1], [0, 0, 0]])}
    attnreg.attach(model, provider)
    with pytest.raises(InputError, match="A multi-label classifier has no single class to explain"):
        provider.attribute(model, batch)
    assert not provider.attributions


@pytest.mark.parametrize(
    "provider",
    [attnreg.HiddenAttributionDropout(), attnreg.HeadMask(by="importance", target="predicted")],
    ids=lambda provider: type(provider).__name__,
)
def test_so_it_is_by_every_regularizer_that_explains_a_class(provider):
    model = bert(problem_type="multi_label_classification")
    with pytest.raises(InputError, match="A multi-label classifier has no single class to explain"):
        attnreg.attach(model, provider)
    for other in (attnreg.HeadMask(by="importance"), attnreg.HeadMask(target="predicted")):
        attnreg.attach(model, other).detach()


def test_an_answer_that_is_cut_off_has_no_label():
    """Its position is beyond the row, as in the losses of transformers."""
    positions = {"start_positions": torch.tensor([1, 9, -1]), "end_positions": torch.tensor([[2], [5], [0]])}
    assert labels_of(positions, torch.zeros(3, 2, 5)).tolist() == [[1, 2], [-100, -100], [0, 0]]


@pytest.mark.parametrize("kind", ["predicted", "label"])
def test_labels_of_another_shape_are_no_classes(kind):
    with pytest.raises(
        InputError, match=r"Labels \(2, 6\) are no classes of logits \(2, 6\): pass `target` as a function"
    ):
        Target(kind).classes(torch.randn(2, 6), {"labels": torch.ones(2, 6, dtype=torch.long)})


def test_rows_without_a_gold_label_have_no_score():
    logits = torch.randn(3, 2)
    batch = {"labels": torch.tensor([0, -100, 1])}
    target = Target("label")
    assert float(target.score(logits, batch, target.classes(logits, batch))) == float(logits[0, 0] + logits[2, 1])


def test_the_padding_of_an_encoder_is_not_that_of_its_decoder():
    batch = {"attention_mask": (torch.arange(8) < 5).int().expand(3, -1), "decoder_input_ids": IDS}
    assert bool((Target().classes(torch.randn(3, 8, 4), batch) >= 0).all())
