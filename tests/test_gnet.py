"""G-Net against a slow version, and where it gets its sizes."""

import math

import pytest
import torch
import transformers as hf
from torch import nn

import attnreg
from tests.cases import MODELS, output

CASES = {case.name: case for case in MODELS}


def small(**options):
    torch.manual_seed(0)
    return attnreg.GNetProvider(11, 6, 3, 8, initial_keep=0.7, **options).double()


def by_loops(net, ids, real):
    """Logits (B, L, N, N) of keeping: Section 4.1 written out."""
    batch, length = ids.shape
    out = torch.zeros(batch, net.num_layers, length, length, dtype=torch.float64)
    wq, wk, wv = net.qkv.weight.chunk(3)
    bq, bk, bv = net.qkv.bias.chunk(3)
    for b in range(batch):
        x = [net.tokens.weight[ids[b, i]] + net.positions.weight[net.position_offset + i] for i in range(length)]
        for layer in range(net.num_layers):
            s = [[(wq @ x[i] + bq) @ (wk @ x[j] + bk) / math.sqrt(net.hidden_size) for j in range(length)]
                 for i in range(length)]  # fmt: skip
            new = []
            for i in range(length):
                allowed = [j for j in range(length) if real[b, j] and (not net.causal or j <= i)]
                total = sum(torch.exp(s[i][j]) for j in allowed)
                mixed = sum(torch.exp(s[i][j]) / total * (wv @ x[j] + bv) for j in allowed)
                y = x[i] + net.out.weight @ mixed + net.out.bias
                y = (y - y.mean()) / torch.sqrt(((y - y.mean()) ** 2).mean() + 1e-5)
                new.append(y * net.norm.weight + net.norm.bias)
                for j in range(length):
                    out[b, layer, i, j] = s[i][j] + net.bias[layer]
            x = new
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_logits(causal):
    net = small(causal=causal, position_offset=2)
    ids = torch.tensor([[1, 5, 2, 0], [3, 3, 9, 4]])
    mask = (ids != 0).long()
    got = net.logits({"input_ids": ids, "attention_mask": mask})
    assert (got - by_loops(net, ids, mask)).abs().max() < 1e-12
    assert torch.equal(net.bias, torch.full((3,), math.log(0.7 / 0.3)).double())


@pytest.mark.parametrize("masks", [1, 3])
def test_sampled_masks_are_those_of_the_next_forward_pass_alone(masks):
    net = small(masks_per_layer=masks)
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


@pytest.mark.parametrize("masks", [1, 3])
def test_log_prob_is_differentiable_and_counts_real_units_only(masks):
    net = small(masks_per_layer=masks)
    inputs = {"input_ids": torch.tensor([[1, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    net.prepare(inputs)
    keep = net.keep.clone()
    value = net.log_prob(inputs, keep.clone())
    keep[:, :, :, 2] ^= True
    keep[:, :, :, :, 2] ^= True
    assert torch.equal(net.log_prob(inputs, keep), value)
    keep[:, 0, -1, 0, 0] ^= True
    assert not torch.equal(net.log_prob(inputs, keep), value)
    value.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    logits = net.logits(inputs)[..., :2, :2]
    keep[:, 0, -1, 0, 0] ^= True
    p = torch.sigmoid(logits)
    expected = sum(torch.where(keep[:, :, m, :2, :2], p, 1 - p).log().sum() for m in range(masks)) / (3 * masks * 4)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)


def test_padding_is_told_by_the_pad_token_where_there_is_no_attention_mask():
    net = small(pad_token_id=0)
    ids = torch.tensor([[1, 5, 0]])
    assert torch.equal(net.units({"input_ids": ids}), net.units({"input_ids": ids, "attention_mask": ids != 0}))
    assert net.units({"input_ids": ids}).sum() == 4


def test_initial_rate():
    torch.manual_seed(0)
    net = attnreg.GNetProvider(30, 16, 2, 64, initial_keep=0.95)
    net.prepare({"input_ids": torch.randint(0, 30, (16, 64))})
    assert 0.9 < net.keep.float().mean() < 0.98


@pytest.mark.parametrize(
    ("name", "hidden", "length", "offset"),
    [("bert", 16, 512, 0), ("roberta", 16, 31, 1), ("electra", 8, 512, 0), ("bart", 16, 32, 2), ("gpt2", 16, 1024, 0)],
)
def test_for_model_takes_embeddings_and_sizes(name, hidden, length, offset):
    model = CASES[name].build()
    net = attnreg.GNetProvider.for_model(model)
    assert (net.vocab_size, net.hidden_size, net.num_layers) == (40, hidden, 2)
    assert (net.max_length, net.position_offset) == (length, offset)
    assert torch.equal(net.tokens.weight, model.get_input_embeddings().weight)
    assert net.tokens.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert net.causal == (name == "gpt2")
    tables = [m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and ("position" in n or "wpe" in n)]
    assert torch.equal(net.positions.weight, tables[0].weight)


def test_size_for_roberta_base_is_the_papers():
    with torch.device("meta"):
        net = attnreg.GNetProvider(50265, 768, 12, 512, position_offset=2)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 41.4


@pytest.mark.parametrize("masks", [1, 4])
def test_masks_reach_their_layer_shared_by_heads_or_not(masks):
    case = CASES["bert"]
    model, batch = case.build(), case.batch()
    net = attnreg.GNetProvider.for_model(model, initial_keep=0.5, masks_per_layer=masks)
    seen = {}

    class Spy(attnreg.MaskProvider):
        def forward(self, site):
            seen[site.layer] = net(site).scores

    spy = Spy()
    with attnreg.attach(model, net & spy):
        output(model, batch)
    for layer in range(2):
        assert torch.equal(seen[layer], net.keep[:, layer])
        assert seen[layer].shape[1] == masks
    assert masks == 1 or not torch.equal(seen[0][:, 0], seen[0][:, 1])


def test_masks_for_another_number_of_heads_are_refused():
    case = CASES["bert"]
    model = case.build()
    with (
        attnreg.attach(model, attnreg.GNetProvider.for_model(model, masks_per_layer=5)),
        pytest.raises(ValueError, match=r"Expected `masks_per_layer` of 1 or 4, the number of heads at .*, got 5"),
    ):
        output(model, case.batch())


def test_a_decoder_of_an_encoder_decoder_is_left_alone():
    case = CASES["bart"]
    model = case.build()
    with attnreg.attach(model, attnreg.GNetProvider.for_model(model, initial_keep=0.5)) as handle:
        output(model, case.batch())
        rates = handle.drop_rates()
    assert rates["encoder.0"] > 0 < rates["encoder.1"]
    assert rates["decoder.0"] == rates["decoder.1"] == 0


def test_multiple_choice_counts_each_choice_as_a_sample():
    config = hf.BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    model = hf.BertForMultipleChoice(config)
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
    assert torch.equal(net.tokens.weight, model.words.weight)
    with attnreg.attach(model, net, example_inputs=(words,)) as handle:
        model(words)
        assert all(rate > 0.2 for rate in handle.drop_rates().values())


@pytest.mark.parametrize(
    ("batch", "error", "sentence"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 16)}, ValueError, "Expected token ids"),
        ({"input_ids": torch.ones(1, 600, dtype=torch.long)}, ValueError, "Expected at most 512 tokens, got 600"),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 1, 3, 3)},
            ValueError,
            r"Expected `attention_mask` in the shape of the token ids, got \(1, 1, 3, 3\)",
        ),
    ],
)
def test_inputs_that_do_not_fit(batch, error, sentence):
    model = CASES["bert"].build()
    with (
        attnreg.attach(model, attnreg.GNetProvider.for_model(model)),
        pytest.raises(error, match=sentence),
    ):
        model(**batch)


def test_a_part_of_the_model_called_alone_is_an_error():
    model = CASES["bert"].build()
    with (
        attnreg.attach(model, attnreg.GNetProvider.for_model(model)),
        pytest.raises(RuntimeError, match="call the attached model itself"),
    ):
        model.bert(torch.ones(1, 3, dtype=torch.long))


def test_another_number_of_layers_is_refused():
    model = CASES["bert"].build()
    with pytest.raises(ValueError, match=r"Expected 3 encoder layers, .* got 2: use `GNetProvider.for_model"):
        attnreg.attach(model, attnreg.GNetProvider(40, 16, 3))
    assert not attnreg.is_attached(model)
