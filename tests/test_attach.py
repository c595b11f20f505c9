"""Attaching: what is found, what is refused, and how it is said."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import attnreg
from attnreg.injection import NoAttentionError, discover
from tests.helpers.cases import BERT, SMALL, TEXT, bert_in_float64, model_case, output
from tests.helpers.handwritten import Layers, plain
from tests.helpers.passes import Recorder, Traces, run
from tests.sweep.checks import Answer


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        (Layers(plain), None, "The inputs of Layers are unknown"),
        (nn.Linear(2, 2), (torch.zeros(1, 2),), "No attention that can be masked was found in Linear: attnreg sees softmax, .* but not other kernels"),
        (Layers(plain), {"input_ids": torch.randn(1, 7)}, r"Layers does not run on example inputs \(RuntimeError: "),
        (Layers(plain), {"y": 1}, r"Layers does not run on example inputs \(TypeError: "),
    ],
)  # fmt: skip
def test_no_attention_to_be_seen(model, inputs, sentence):
    before = Traces(model)
    with pytest.raises(NoAttentionError, match=sentence):
        attnreg.attach(model, attnreg.DropKey(), example_inputs=inputs)
    assert vars(Traces(model)) == vars(before)


def test_a_provider_sees_inputs_by_their_names():
    model, recorder, ids = Layers(plain), Recorder(), torch.ones(2, 5, dtype=torch.long)
    with attnreg.attach(model, recorder, example_inputs=(ids,)):
        model(ids)
    assert [list(each) for each in recorder.prepared] == [["input_ids"]]


EMPTY = "to be a non-empty list, or None for all, got "


@pytest.mark.parametrize(
    ("provider", "options", "sentence"),
    [
        ("DropKey()", {"layers": [0, 2]}, r"Expected layers among \[0, 1\] in `attach\(layers=\.\.\.\)`, got \[2\]"),
        ("DropKey()", {"layers": [-3]}, r"got \[-3\]"),
        ("DropKey()", {"layers": []}, rf"Expected `layers` {EMPTY}\[\]"),
        ("DropKey()", {"layers": 0}, f"Expected `layers` {EMPTY}0"),
        ("DropKey()", {"layers": math.nan}, f"Expected `layers` {EMPTY}nan"),
        ("DropKey()", {"stacks": "encoder"}, f"Expected `stacks` {EMPTY}'encoder'"),
        ("DropKey()", {"stacks": ["decoder"]}, r"Expected `stacks` among those of the model, \['encoder'\], got \['decoder'\]"),
        ("AttributionProvider(layers=[7])", {}, r"Expected layers among \[0, 1\] in AttributionProvider, got \[7\]"),
        ("DropKey() & OnLayers(DropKey(), [5])", {}, r"Expected layers among \[0, 1\] in OnLayers, got \[5\]"),
        ("OnLayers(DropKey(), [0])", {"layers": [1]}, r"in OnLayers, got \[0\]"),
        ("OnLayers(OnLayers(DropKey(), [0]), [1])", {}, r"Expected layers among \[1\] in OnLayers, got \[0\]"),
        ("OnLayers(OnLayers(DropKey(), [7]), [0])", {}, r"Expected layers among .* in OnLayers"),
        ("OnLayers(OnLayers(DropKey(), [0, 7]), [0])", {}, r"Expected layers among .* in OnLayers"),
        ("OnLayers(OnLayers(DropKey(), [0, 1]), [1])", {}, r"Expected layers among .* in OnLayers"),
        ("OnLayers(HiddenDropout(), [0, 7])", {}, r"Expected layers among \[0, 1\] in OnLayers, got \[7\]"),
    ],
)  # fmt: skip
def test_layers_and_stacks_that_are_not_there(provider, options, sentence):
    model = BERT.build()
    with pytest.raises(ValueError, match=sentence):
        attnreg.attach(model, attnreg.parse_provider(provider), **options)
    assert not attnreg.is_attached(model)


def test_one_provider_at_a_time():
    model = BERT.build()
    with attnreg.attach(model, attnreg.DropKey()):
        for part in (model, model.bert):
            with pytest.raises(RuntimeError, match="Compose providers with `a & b`"):
                attnreg.attach(part, attnreg.DropKey())
    attnreg.attach(model.bert, attnreg.DropKey())
    assert attnreg.is_attached(model)
    attnreg.detach(model)
    assert not attnreg.is_attached(model.bert)
    attnreg.detach(model)


def test_one_provider_has_one_model():
    one, other = BERT.build(), BERT.build()
    provider = attnreg.DropKey(0.1)
    handle = attnreg.attach(one, attnreg.OnLayers(provider, [0]))
    with pytest.raises(RuntimeError, match="This DropKey is already attached to another model"):
        attnreg.attach(other, provider & attnreg.AttentionLayerDrop(0.1))
    assert not attnreg.is_attached(other)
    handle.detach()
    attnreg.attach(other, provider)


@pytest.mark.parametrize("field", ["scores", "weights"])
def test_a_mask_of_the_wrong_shape_names_the_provider_and_the_place(field):
    model, wrong = BERT.build(), attnreg.Mask(**{field: torch.ones(3, 4, 6, 7, dtype=torch.bool)})
    says = rf"Expected the {field} mask of Answer .* \(3, 4, 6, 6\), got \(3, 4, 6, 7\)"
    with attnreg.attach(model, Answer(lambda site: wrong)), pytest.raises(ValueError, match=says):
        model(**BERT.batch())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scores": torch.ones(2)}, "`scores` to be a bool tensor .*, got torch.float32"),
        ({"kept": [True]}, "`kept` to be a bool tensor .*, got <class 'list'>"),
        ({"weights": 0.5}, "`weights` to be a tensor, got <class 'float'>"),
    ],
)
def test_fields_of_a_mask_are_tensors(fields, says):
    with pytest.raises(TypeError, match=f"Expected {says}"):
        attnreg.Mask(**fields)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, memory):
        return self.attention(x, memory, memory)[0]


def test_a_cross_attention_alone_wants_to_be_asked_for():
    model, inputs = Cross(), {"x": torch.randn(2, 5, 8), "memory": torch.randn(2, 5, 8)}
    with pytest.raises(
        ValueError, match=r"No attention is selected; the default is self-attention\. Pass `stacks=\['cross'\]`"
    ):
        attnreg.attach(model, attnreg.DropKey(), example_inputs=inputs)
    with attnreg.attach(model, attnreg.DropKey(), stacks=["cross"], example_inputs=inputs) as handle:
        assert [site.label for site in handle.sites] == ["cross.0"]


def decoder_with_cross_attention():
    config = hf.BertConfig(**TEXT, **SMALL, is_decoder=True, add_cross_attention=True)
    encoder = hf.BertModel(copy.deepcopy(config), add_pooling_layer=False)
    return hf.EncoderDecoderModel(encoder=encoder, decoder=hf.BertLMHeadModel(config))


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2), ["decoder", "cross"] * 2),
        (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), ["encoder", "decoder", "cross"]),
        (lambda: nn.MultiheadAttention(8, 2), ["encoder"]),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16), ["encoder"]),
        (decoder_with_cross_attention, ["decoder", "cross"] * 2),
    ],
)
def test_stacks(make, labels):
    assert [site.info.stack for site in discover(make()).sites][-len(labels) :] == labels


@pytest.mark.parametrize("head", ["MultipleChoice", "TokenClassification", "QuestionAnswering", "MaskedLM"])
def test_heads_do_not_matter(head):
    names = [site.info.name for site in discover(bert_in_float64(getattr(hf, f"BertFor{head}"))).sites]
    assert names == [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]


def test_shared_modules_are_told_apart_by_their_call():
    case = model_case("albert")
    model = case.build()
    with attnreg.attach(model, attnreg.AttentionLayerDrop(1.0), layers=[1]) as handle:
        for _ in range(2):
            output(model, case.batch())
        assert handle.drop_rates() == {"encoder.1": 1.0}
        assert [site.name[-2:] for site in handle.sites] == ["#2"]


def test_a_bidirectional_encoder_layer_keeps_its_fast_path_in_eval(monkeypatch):
    case, slow = model_case("torch-encoder"), []
    model = case.build().eval()
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: slow.append(1) or sdpa(*a, **k))
    attnreg.attach(model, attnreg.DropKey())
    with torch.no_grad():
        model(**case.batch())
    assert not slow


def test_detaching_under_a_wrapper_put_around_it_later():
    model, batch = BERT.build(), BERT.batch()
    plain = run(model, batch)
    module = model.bert.encoder.layer[0].attention.self
    handle = attnreg.attach(model, attnreg.AttentionLayerDrop(1.0))
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    handle.detach()
    assert torch.equal(run(model, batch)[0], plain[0])


def test_a_wrapper_that_was_there_before_stays():
    model, calls = BERT.build(), []
    module = model.bert.encoder.layer[0].attention.self
    plain = module.forward
    wrapper = module.forward = lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)
    with attnreg.attach(model, attnreg.DropKey()):
        calls.clear()
        model(**BERT.batch())
        assert len(calls) == 1
    assert module.forward is wrapper


def test_handle_shows_what_it_is_attached_to():
    handle = attnreg.attach(BERT.build(), attnreg.AttentionDropout(0.1))
    assert "AttentionDropout(p=0.1" in repr(handle)
    assert "encoder.1: bert.encoder.layer.1.attention.self" in repr(handle)
    handle.detach()
    assert "detached" in repr(handle)


def test_drop_rates_count_no_padding():
    model, batch = BERT.build(), BERT.batch()
    keep = batch["attention_mask"].bool()[:, None, None, :]  # drops padding alone, which is not there to be dropped
    with attnreg.attach(model, Answer(lambda site: attnreg.Mask(scores=keep))) as handle:
        assert handle.drop_rates() == {}
        model(**batch)
        assert handle.drop_rates() == {"encoder.0": 0.0, "encoder.1": 0.0}


def test_drop_rates_are_those_of_the_latest_training_pass():
    model, provider = BERT.build(), attnreg.AttentionLayerDrop(1.0)
    with attnreg.attach(model, provider) as handle:
        model(**BERT.batch())
        assert handle.drop_rates() == {"encoder.0": 1.0, "encoder.1": 1.0}
        provider.eval()
        model(**BERT.batch())
        assert handle.drop_rates() == {}


def test_data_parallel_says_what_to_do_instead():
    model = BERT.build()
    with attnreg.attach(model, attnreg.DropKey()):
        replica = model._replicate_for_data_parallel()
        with pytest.raises(RuntimeError, match="shallow copy of the attached model"):
            replica(**BERT.batch())
