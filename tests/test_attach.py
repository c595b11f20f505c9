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
from tests.cases import MODELS, output
from tests.test_contract import Recorder, Traces, run

CASES = {case.name: case for case in MODELS}
Noop = Recorder


class Attention(nn.Module):
    """Single-head attention as people write it; ``hidden`` does the softmax by hand."""

    def __init__(self, hidden=False):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.hidden = hidden

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(8)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True) if self.hidden else scores.softmax(-1)
        return weights @ v


class Tagger(nn.Module):
    """Token-level probabilities at the end: a softmax that is not attention."""

    def __init__(self, hidden=False):
        super().__init__()
        self.attention = Attention(hidden)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.attention(x)).softmax(-1)


def test_hand_written_attention_is_found_and_token_probabilities_are_not():
    model = Tagger()
    with attnreg.attach(model, Noop(), example_inputs={"x": torch.randn(1, 7, 8)}) as handle:
        assert [site.name for site in handle.sites] == ["attention"]
        model(torch.randn(2, 3, 8))
        assert [site.shape for site in handle.provider.sites] == [(2, 1, 3, 3)]
        assert list(handle.provider.prepared[0]) == ["x"]


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        (Tagger(), None, "The inputs of Tagger are unknown"),
        (
            Tagger(hidden=True),
            {"x": torch.randn(1, 7, 8)},
            r"No attention that can be masked was found in Tagger: .*attention \(attention: its weights come from a function that cannot",
        ),
        (nn.Linear(2, 2), (torch.zeros(1, 2),), "No attention that can be masked was found in Linear: attnreg sees softmax, .* but not other kernels"),
        (Tagger(), {"x": torch.randn(1, 7, 9)}, r"Tagger does not run on example inputs \(RuntimeError: "),
        (Tagger(), {"y": 1}, r"Tagger does not run on example inputs \(TypeError: "),
    ],
)  # fmt: skip
def test_no_attention_to_be_seen(model, inputs, sentence):
    before = Traces(model)
    with pytest.raises(NoAttentionError, match=sentence):
        attnreg.attach(model, Noop(), example_inputs=inputs)
    assert vars(Traces(model)) == vars(before)


def test_attention_that_hides_after_attaching_is_an_error_not_silence():
    model = Tagger()
    with attnreg.attach(model, Noop(), example_inputs={"x": torch.randn(1, 7, 8)}):
        model.attention.hidden = True
        with pytest.raises(
            NoAttentionError, match=r"attention hides its attention in this forward pass: 0 of 1 computations were seen"
        ):
            model(torch.randn(1, 3, 8))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": [0, 2]}, r"Expected layers among \[0, 1\] in `attach\(layers=\.\.\.\)`, got \[2\]"),
        ({"layers": [-3]}, r"got \[-3\]"),
        ({"layers": []}, r"Expected `layers` to be a non-empty list, or None for all, got \[\]"),
        ({"layers": 0}, r"Expected `layers` to be a non-empty list, or None for all, got 0"),
        ({"layers": math.nan}, r"Expected `layers` to be a non-empty list, or None for all, got nan"),
        ({"stacks": "encoder"}, r"Expected `stacks` to be a non-empty list, or None for all, got 'encoder'"),
        ({"stacks": ["decoder"]}, r"Expected `stacks` among those of the model, \['encoder'\], got \['decoder'\]"),
    ],
)
def test_layers_and_stacks_that_are_not_there(options, sentence):
    model = CASES["bert"].build()
    with pytest.raises(ValueError, match=sentence):
        attnreg.attach(model, Noop(), **options)
    assert not attnreg.is_attached(model)


def test_layers_that_are_no_list():
    for layers in (math.nan, 1, "1", {1: 2}, []):
        with pytest.raises(
            ValueError, match=r"Expected `layers` of OnLayers to be a list with at least one index, got "
        ):
            attnreg.OnLayers(attnreg.AttentionDropout(0.1), layers)


def test_on_layers_that_are_not_there():
    model = CASES["bert"].build()
    with pytest.raises(ValueError, match=r"Expected layers among \[0, 1\] in OnLayers, got \[5\]"):
        attnreg.attach(model, attnreg.AttentionDropout(0.1) & attnreg.OnLayers(attnreg.AttentionDropout(0.1), [5]))
    with pytest.raises(ValueError, match=r"in OnLayers, got \[0\]"):
        attnreg.attach(model, attnreg.OnLayers(attnreg.AttentionDropout(0.1), [0]), layers=[1])
    assert not attnreg.is_attached(model)


def test_one_provider_at_a_time():
    model = CASES["bert"].build()
    with attnreg.attach(model, Noop()):
        for part in (model, model.bert):
            with pytest.raises(RuntimeError, match="Compose providers with `a & b`"):
                attnreg.attach(part, Noop())
    attnreg.attach(model.bert, Noop())
    assert attnreg.is_attached(model)
    attnreg.detach(model)
    assert not attnreg.is_attached(model.bert)
    attnreg.detach(model)


def test_only_providers_can_be_attached():
    with pytest.raises(TypeError, match="Expected `provider` to be a regularizer, got Dropout"):
        attnreg.attach(CASES["bert"].build(), nn.Dropout(0.1))


class Answering(attnreg.MaskProvider):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, site):
        return self.mask


@pytest.mark.parametrize("field", ["scores", "weights"])
def test_a_mask_of_the_wrong_shape_names_the_provider_and_the_place(field):
    model, batch = CASES["bert"].build(), CASES["bert"].batch()
    wrong = attnreg.Mask(**{field: torch.ones(3, 4, 6, 7, dtype=torch.bool)})
    with (
        attnreg.attach(model, Answering(wrong)),
        pytest.raises(
            ValueError, match=rf"Expected the {field} mask of Answering .* \(3, 4, 6, 6\), got \(3, 4, 6, 7\)"
        ),
    ):
        model(**batch)


def test_scores_masks_are_boolean():
    with pytest.raises(TypeError, match="Expected `scores` to be a bool tensor"):
        attnreg.Mask(scores=torch.ones(2))


def test_a_cross_attention_alone_wants_to_be_asked_for():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, memory):
            return self.attention(x, memory, memory)[0]

    model, x = Model(), torch.randn(2, 5, 8)
    inputs = {"x": x, "memory": torch.randn(2, 5, 8)}
    with pytest.raises(
        ValueError, match=r"No attention is selected; the default is self-attention\. Pass `stacks=\['cross'\]`"
    ):
        attnreg.attach(model, Noop(), example_inputs=inputs)
    with attnreg.attach(model, Noop(), stacks=["cross"], example_inputs=inputs) as handle:
        assert [site.label for site in handle.sites] == ["cross.0"]


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2), ["decoder", "cross"] * 2),
        (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), ["encoder", "decoder", "cross"]),
        (lambda: nn.MultiheadAttention(8, 2), ["encoder"]),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16), ["encoder"]),
    ],
)
def test_torchs_own_modules(make, labels):
    model = make()
    assert [site.info.stack for site in discover(model).sites] == labels


@pytest.mark.parametrize("head", ["MultipleChoice", "TokenClassification", "QuestionAnswering", "MaskedLM"])
def test_heads_do_not_matter(head):
    config = hf.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    model = getattr(hf, f"BertFor{head}")(config)
    assert [site.info.name for site in discover(model).sites] == [
        f"bert.encoder.layer.{i}.attention.self" for i in range(2)
    ]


def test_a_decoder_with_cross_attention_of_its_own():
    config = hf.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, is_decoder=True,
        add_cross_attention=True,
    )  # fmt: skip
    model = hf.EncoderDecoderModel(
        encoder=hf.BertModel(copy.deepcopy(config), add_pooling_layer=False), decoder=hf.BertLMHeadModel(config)
    )
    stacks = [site.info.stack for site in discover(model).sites]
    assert stacks[-4:] == ["decoder", "cross", "decoder", "cross"]


def test_discovery_leaves_the_models_memory_alone():
    model = nn.Sequential(nn.BatchNorm1d(7), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).train()
    before = copy.deepcopy(model.state_dict())
    attnreg.attach(model, Noop(), example_inputs=(torch.randn(2, 7, 8),)).detach()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_shared_modules_are_told_apart_by_their_call():
    case = CASES["albert"]
    model = case.build()
    with attnreg.attach(model, attnreg.AttentionLayerDrop(1.0), layers=[1]) as handle:
        output(model, case.batch())
        output(model, case.batch())
        assert handle.drop_rates() == {"encoder.1": 1.0}
        assert [site.name[-2:] for site in handle.sites] == ["#2"]


def test_a_bidirectional_encoder_layer_keeps_its_fast_path_in_eval(monkeypatch):
    model = CASES["torch-encoder"].build().eval()
    slow = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: slow.append(1) or sdpa(*a, **k))
    attnreg.attach(model, Noop())
    with torch.no_grad():
        model(**CASES["torch-encoder"].batch())
    assert not slow


def test_detaching_under_a_wrapper_put_around_it_later():
    case = CASES["bert"]
    model, batch = case.build(), case.batch()
    plain = run(model, batch)
    module = model.bert.encoder.layer[0].attention.self
    handle = attnreg.attach(model, Answering(attnreg.Mask(scores=torch.tensor(False))))
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    handle.detach()
    after = run(model, batch)
    assert torch.equal(after[0], plain[0])


def test_a_wrapper_that_was_there_before_stays():
    case = CASES["bert"]
    model, batch = case.build(), case.batch()
    module, calls = model.bert.encoder.layer[0].attention.self, []
    plain = module.forward

    def wrapper(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    module.forward = wrapper
    with attnreg.attach(model, Noop()):
        calls.clear()
        model(**batch)
        assert len(calls) == 1
    assert module.forward is wrapper


def test_handle_shows_what_it_is_attached_to():
    model = CASES["bert"].build()
    handle = attnreg.attach(model, attnreg.AttentionDropout(0.1))
    assert "AttentionDropout(p=0.1" in repr(handle)
    assert "encoder.1: bert.encoder.layer.1.attention.self" in repr(handle)
    handle.detach()
    assert "detached" in repr(handle)


def test_drop_rates_count_no_padding():
    case = CASES["bert"]
    model, batch = case.build(), case.batch()
    keep = batch["attention_mask"].bool()[:, None, None, :]  # drops padding alone, which is not there to be dropped
    with attnreg.attach(model, Answering(attnreg.Mask(scores=keep))) as handle:
        assert handle.drop_rates() == {}
        model(**batch)
        assert handle.drop_rates() == {"encoder.0": 0.0, "encoder.1": 0.0}


class Gated(nn.Module):
    """Attention and, in the same forward, a softmax over three dimensions that is none."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.gate = nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.gates = self.gate(x).softmax(-1)
        return F.scaled_dot_product_attention(q, k, v)


def test_gates_are_not_taken_for_attention():
    model, recorder = Gated(), Recorder()
    x = torch.randn(3, 5, 8)
    model(x)
    gates = model.gates
    with attnreg.attach(model, attnreg.AttentionDropout(0.9, "scores") & recorder, example_inputs=(x[:1],)):
        model(x)
    assert torch.equal(model.gates, gates)
    assert [site.shape for site in recorder.sites] == [(3, 2, 5, 5)]


def test_data_parallel_says_what_to_do_instead():
    model = CASES["bert"].build()
    with attnreg.attach(model, Noop()):
        replica = model._replicate_for_data_parallel()
        with pytest.raises(RuntimeError, match="shallow copy of the attached model"):
            replica(**CASES["bert"].batch())


def test_drop_rates_are_those_of_the_latest_training_pass():
    model, provider = CASES["bert"].build(), attnreg.AttentionLayerDrop(1.0)
    with attnreg.attach(model, provider) as handle:
        run(model, CASES["bert"].batch())
        assert handle.drop_rates() == {"encoder.0": 1.0, "encoder.1": 1.0}
        provider.eval()
        run(model, CASES["bert"].batch())
        assert handle.drop_rates() == {}
