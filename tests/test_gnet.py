"""G-Net against a slow version: its logits, its decisions, and where it gets its sizes."""

import itertools
import math

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from attnreg.attendout.sizes import embedding_tables
from attnreg.errors import InputError
from tests.helpers.cases import BERT, bert_in_float64, model_case, output, refused
from tests.helpers.regularizers import Watch


def small(**options):
    torch.manual_seed(0)
    return attnreg.GNetProvider(11, 6, 3, 8, initial_keep=0.7, **options).double()


def normed(norm, y):
    return (y - y.mean()) / torch.sqrt(((y - y.mean()) ** 2).mean() + 1e-5) * norm.weight + norm.bias


def by_loops(provider, ids, real):
    """Logits (B, L, G, N, N) of keeping: Section 4.1 written out."""
    net, heads = provider.network, provider.num_heads
    (batch, length), width = ids.shape, provider.hidden_size // heads
    out = torch.zeros(batch, provider.num_layers, heads, length, length, dtype=torch.float64)
    wq, wk, wv = net.qkv.weight.chunk(3)
    bq, bk, bv = net.qkv.bias.chunk(3)
    for b in range(batch):
        x = [net.tokens.weight[ids[b, i]] + net.positions.weight[provider.position_offset + i] for i in range(length)]
        x = [normed(net.embedding_norm, each) for each in x]
        for layer in range(provider.num_layers):
            new = []
            for i in range(length):
                allowed = [j for j in range(length) if real[b, j] and (not provider.causal or j <= i)]
                mixed = []
                for g in range(heads):
                    own = slice(g * width, (g + 1) * width)
                    s = [(wq @ x[i] + bq)[own] @ (wk @ x[j] + bk)[own] / math.sqrt(width) for j in range(length)]
                    total = sum(torch.exp(s[j]) for j in allowed)
                    mixed.append(sum(torch.exp(s[j]) / total * (wv @ x[j] + bv)[own] for j in allowed))
                    for j in range(length):
                        out[b, layer, g, i, j] = s[j] + net.bias[layer]
                new.append(normed(net.norm, x[i] + net.out.weight @ torch.cat(mixed) + net.out.bias))
            x = new
    return out


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_logits(causal, heads):
    net = small(causal=causal, position_offset=2, num_heads=heads)
    ids = torch.tensor([[1, 5, 2, 0], [3, 3, 9, 4]])
    mask = (ids != 0).long()
    got, slow = net.logits({"input_ids": ids, "attention_mask": mask}), by_loops(net, ids, mask)
    assert (got - slow).abs().max() < 1e-12
    weights, random = [*net.parameters()], torch.randn(got.shape).double()  # one head needs fewer products than several
    found, expected = (torch.autograd.grad((random * each).sum(), weights) for each in (got, slow))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))
    assert torch.equal(net.network.bias, torch.full((3,), math.log(0.7 / 0.3)).double())


masks_and_heads = pytest.mark.parametrize(("masks", "heads"), [(1, 1), (3, 1), (1, 3)])


@masks_and_heads
def test_sampled_masks_are_those_of_the_next_forward_pass_alone(masks, heads):
    net = small(masks_per_layer=masks, num_heads=heads)
    inputs = {"input_ids": torch.tensor([[1, 5, 2, 4]])}
    value = net.sample(inputs)
    keep = net.keep
    assert value.requires_grad
    assert torch.equal(value, net.log_prob(inputs, keep))
    net.prepare(inputs)
    assert net.keep is keep
    torch.manual_seed(0)
    net.prepare(inputs)
    assert net.keep is not keep
    torch.manual_seed(0)
    net.sample(inputs)
    again = net.keep
    torch.manual_seed(0)
    net.prepare(inputs)
    net.prepare(inputs)
    assert torch.equal(net.keep, again)  # the same draw, whichever way


def test_sampled_masks_are_not_of_other_inputs():
    net = small()
    net.sample({"input_ids": torch.tensor([[1, 5, 2, 4]])})
    with pytest.raises(InputError, match="has other inputs than `sample`, which drew its masks"):
        net.prepare({"input_ids": torch.tensor([[1, 5, 2, 3]])})


def test_padding_is_told_by_the_pad_token_where_there_is_no_attention_mask():
    net = small(pad_token_id=0)
    ids = torch.tensor([[1, 5, 0]])
    assert torch.equal(net.units({"input_ids": ids}), net.units({"input_ids": ids, "attention_mask": ids != 0}))
    assert net.units({"input_ids": ids}).sum() == 4


@pytest.mark.parametrize(
    ("name", "hidden", "length", "offset"),
    [("bert", 16, 512, 0), ("roberta", 16, 31, 1), ("electra", 8, 512, 0), ("bart", 16, 32, 2), ("gpt2", 16, 1024, 0)],
)
def test_for_model_takes_embeddings_and_sizes(name, hidden, length, offset):
    model = model_case(name).build()
    net = attnreg.GNetProvider.for_model(model)
    assert (net.vocab_size, net.hidden_size, net.num_layers) == (40, hidden, 2)
    assert (net.max_length, net.position_offset) == (length, offset)
    assert torch.equal(net.network.tokens.weight, model.get_input_embeddings().weight)
    assert net.network.tokens.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert net.causal == (name == "gpt2")
    tables = [m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and ("position" in n or "wpe" in n)]
    assert torch.equal(net.network.positions.weight, tables[0].weight)


def test_it_has_the_size_that_the_paper_states():
    with torch.device("meta"):
        net = attnreg.GNetProvider(50265, 768, 12, 512, position_offset=2)  # of RoBERTa-base
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 41.4


def test_tokens_beyond_the_vocabulary_are_named():
    provider = attnreg.GNetProvider(vocab_size=40, hidden_size=8, num_layers=1, initial_keep=None)
    with pytest.raises(
        ValueError, match=r"Expected token ids below 40, as in the G-Net's table, got 45: make a new G-Net once the"
    ):
        provider.logits({"input_ids": torch.tensor([[3, 45]])})


@pytest.mark.parametrize(("masks", "heads"), [(1, 1), (4, 1), (1, 4)])
def test_masks_reach_their_layer_shared_by_heads_or_not(masks, heads):
    model, batch = BERT.build(), BERT.batch()
    net = attnreg.GNetProvider.for_model(model, initial_keep=0.5, masks_per_layer=masks, num_heads=heads)
    with attnreg.attach(model, Watch(net)) as handle:
        output(model, batch)
    (_, first), (_, second) = handle.provider.seen.values()
    for layer, dropped in enumerate((first, second)):
        assert torch.equal(~dropped, net.keep[:, layer])
        assert dropped.shape[1] == masks * heads
    assert masks == heads == 1 or not torch.equal(first[:, 0], first[:, 1])


test_arguments_out_of_range = refused(
    (lambda: small(num_heads=2, masks_per_layer=2), "Expected `masks_per_layer` to be 1 with `num_heads` 2, .*, got 2"),
    (lambda: small(num_heads=4), "Expected `num_heads` to divide `hidden_size`, 6 .*, got 4"),
)


def test_a_decoder_of_an_encoder_decoder_is_left_alone():
    case = model_case("bart")
    model = case.build()
    with attnreg.attach(model, attnreg.GNetProvider.for_model(model, initial_keep=0.5)) as handle:
        output(model, case.batch())
        rates = handle.drop_rates()
    assert rates["encoder.0"] > 0 < rates["encoder.1"]
    assert rates["decoder.0"] == rates["decoder.1"] == 0


def test_multiple_choice_counts_each_choice_as_a_sample():
    model = bert_in_float64(hf.BertForMultipleChoice).train()
    with attnreg.attach(model, attnreg.GNetProvider.for_model(model)) as handle:
        model(input_ids=torch.randint(1, 40, (2, 4, 5)))
        assert handle.provider.keep.shape == (8, 2, 1, 5, 5)


class Tagger(nn.Module):
    """A model of one's own: its inputs and tables have other names."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)

    def forward(self, words):
        return self.encoder(self.words(words))


def test_a_model_of_ones_own():
    model, words = Tagger(), torch.randint(1, 20, (3, 7))
    net = attnreg.GNetProvider.for_model(model, initial_keep=0.5, example_inputs=(words,))
    assert torch.equal(net.network.tokens.weight, model.words.weight)
    with attnreg.attach(model, net, example_inputs=(words,)) as handle:
        model(words)
        assert all(rate > 0.2 for rate in handle.drop_rates().values())


def test_tables_that_are_not_torchs_own_and_none():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = hf.IBertModel(hf.IBertConfig(**sizes, vocab_size=30, max_position_embeddings=20))
    provider = attnreg.GNetProvider.for_model(model)
    assert (provider.vocab_size, provider.hidden_size, provider.max_length) == (30, 8, 18)
    with pytest.raises(ValueError, match="CanineModel takes no token ids, or has no single embedding table for them"):
        attnreg.GNetProvider.for_model(hf.CanineModel(hf.CanineConfig(**sizes)))


def test_positions_of_images_are_not_those_of_tokens():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision = nn.ModuleDict({"position_embedding": nn.Embedding(9, 8)})
            self.text = nn.ModuleDict({"tokens": nn.Embedding(30, 8)})

    model = Model()
    assert embedding_tables(model) == (model.text["tokens"], None, 0)
    model.position_embedding = nn.Embedding(40, 8)
    assert embedding_tables(model) == (model.text["tokens"], model.position_embedding, 0)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 16)}, "hold no token ids, which G-Net reads"),
        ({"input_ids": torch.ones(1, 600, dtype=torch.long)}, "Expected at most 512 tokens, got 600"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 1, 3, 3)},
         r"Expected `attention_mask` to have the shape of the token ids, got \(1, 1, 3, 3\)"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit(batch, sentence):
    model = BERT.build()
    with attnreg.attach(model, attnreg.GNetProvider.for_model(model)), pytest.raises(ValueError, match=sentence):
        model(**batch)


def test_a_part_of_the_model_called_alone_is_an_error():
    model = BERT.build()
    with attnreg.attach(model, attnreg.GNetProvider.for_model(model)):
        with pytest.raises(RuntimeError, match="Call BertForSequenceClassification itself, or attach to the module"):
            model.bert.encoder.layer[0](torch.ones(1, 3, 16))
        with pytest.raises(ValueError, match="hold no token ids, which G-Net reads"):
            model.bert.encoder(torch.ones(1, 3, 16))


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        ({"num_layers": 3}, r"made for 3 encoder layers, but the model has 2: use `GNetProvider.for_model"),
        ({"masks_per_layer": 8}, r"Expected `masks_per_layer` to be 1 or 4, the heads of .*, got 8"),
        ({"num_heads": 8}, r"Expected `num_heads` to be 1 or 4, the heads of .*, got 8"),
    ],
)
def test_another_number_of_layers_or_heads_is_refused(net, sentence):
    model = BERT.build()
    with pytest.raises(ValueError, match=sentence):
        attnreg.attach(model, attnreg.GNetProvider(40, 16, **{"num_layers": 2, **net}))
    assert not attnreg.is_attached(model)


ragged = {
    "input_ids": torch.tensor([[1, 5, 2, 5], [7, 5, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}
GRAINS = ["unit", "key", "type", "word", "batch"]
grains = pytest.mark.parametrize("decisions", GRAINS)


def units_of(values, decisions):
    """The values, ``(B, L, N, N)``, of the units of each decision, by the number of the sample where each has its own."""
    found = {}
    for layer, (b, length) in itertools.product(range(3), enumerate([4, 2])):
        for i, j in itertools.product(range(length), repeat=2):
            token = int(ragged["input_ids"][b, j])
            own = {
                "unit": (b, layer, i, j),
                "key": (b, layer, j),
                "type": (layer, token),
                "word": token,
                "batch": layer,
            }
            found.setdefault(own[decisions], []).append(values[b, layer, i, j])
    return {name: torch.stack(each) for name, each in found.items()}


@grains
@masks_and_heads
@pytest.mark.parametrize("asked", [0.05, 0.5, 0.9])
def test_the_first_batch_is_kept_at_the_rate_asked_for(decisions, masks, heads, asked):
    """In every layer, however far apart the logits are, and counting real tokens alone."""
    options = {"masks_per_layer": masks, "num_heads": heads, "decisions": decisions}
    torch.manual_seed(0)
    net = attnreg.GNetProvider(11, 6, 3, 8, initial_keep=asked, **options).double()
    for parameter in net.network.parameters():
        nn.init.normal_(parameter, std=0.7)
    net.prepare(ragged)
    of_heads = [units_of(net.logits(ragged)[:, :, each], decisions).items() for each in range(heads)]
    for layer in range(1 if decisions == "word" else 3):
        place = {"unit": 1, "key": 1, "type": 0}.get(decisions)
        chances = [
            torch.sigmoid(own.mean())
            for found in of_heads
            for name, own in found
            if decisions == "word" or layer == (name if place is None else name[place])
        ]
        assert torch.stack(chances).mean().item() == pytest.approx(asked, abs=1e-9)
    bias = net.network.bias.clone()
    net.prepare({"input_ids": torch.tensor([[9, 9, 8]])})
    net.sample(ragged)
    assert torch.equal(net.network.bias, bias)  # the first batch alone
    saved = attnreg.GNetProvider(11, 6, 3, 8, **options).double()
    saved.load_state_dict(net.state_dict())
    saved.prepare({"input_ids": torch.tensor([[9, 9, 8]])})
    assert torch.equal(saved.network.bias, bias)


@grains
@masks_and_heads
def test_decisions_are_shared_and_their_probability_counts_each_once(decisions, masks, heads):
    net = small(masks_per_layer=masks, num_heads=heads, decisions=decisions)
    torch.manual_seed(1)
    value = net.sample(ragged)
    keep, logits = net.keep, net.logits(ragged)
    shares = {0: [], 1: []}  # of both samples
    for m in range(masks * heads):
        of_logits, of_masks = (units_of(each, decisions) for each in (logits[:, :, m // masks], keep[:, :, m]))
        for name, kept in of_masks.items():
            assert (kept == kept[0]).all()
            logit = of_logits[name].mean()
            for sample in [name[0]] if decisions in ("unit", "key") else [0, 1]:
                shares[sample].append(torch.log(torch.sigmoid(logit if kept[0] else -logit)))
    expected = torch.stack([torch.stack(each).mean() for each in shares.values()])
    assert torch.allclose(value, expected, atol=1e-12)
    padding = ~net.units(ragged)[:, None, None]
    assert torch.equal(net.log_prob(ragged, keep ^ padding if decisions == "unit" else keep), value)
    found, slow = (torch.autograd.grad(each.sum(), [*net.parameters()]) for each in (value, expected))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, slow, strict=True))


# The value of several masks and heads is tested above; that they are drawn at it shows with one grain as with all.
@pytest.mark.parametrize(
    ("decisions", "masks", "heads"), [*((grain, 1, 1) for grain in GRAINS), ("unit", 3, 1), ("unit", 1, 3)]
)
def test_decisions_come_as_often_as_they_are_probable(decisions, masks, heads):
    torch.manual_seed(0)
    net = small(decisions=decisions, masks_per_layer=masks, num_heads=heads)
    real, mean = net.units(ragged)[:, None, None], 0
    for _ in range(100):
        net.prepare(ragged)
        mean = mean + net.keep.double() / 100
    expected = net.keep_probability(ragged).repeat_interleave(masks, 2)
    assert ((mean - expected) * real).abs().max() < 5 * 0.5 / 10
