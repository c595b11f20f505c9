"""Attached models whose masks are drawn within kernels compute what they compute with masks of tensors."""

import functools

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg import kernels
from attnreg.injection.backends import fused
from tests.helpers.kernel_cases import DEVICE, DTYPE, MARKS

pytestmark = MARKS
SMALL = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
IDS = torch.randint(1, 50, (2, 19), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(IDS)
RIGHT, LEFT = ONES.tril(11), ONES.triu(1).flip(1).flip(1)
RIGHT[0], LEFT[0] = 1, 1


def bert(**options):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **options}
    return hf.BertModel(hf.BertConfig(**SMALL, **dropout))


def llama():
    return hf.LlamaModel(hf.LlamaConfig(**SMALL, num_key_value_heads=2, use_cache=False))


MODELS = {
    "bert": (bert, RIGHT),
    "bert with dropout": (lambda: bert(attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.2), RIGHT),
    "llama": (llama, None),
    "llama, padded": (llama, RIGHT),
    "llama, padded on the left": (llama, LEFT),
}
DROP = attnreg.AttentionDropout
PROVIDERS = {
    "scores": lambda: DROP(0.3, placement="scores"),
    "weights": lambda: DROP(0.3),
    "weights, twice": lambda: DROP(0.2) & DROP(0.3),
    "not rescaled": lambda: DROP(0.3, rescale=False),
    "heads": lambda: attnreg.DropHead(0.4),
    "keys": lambda: attnreg.DropKey(0.3, share_queries=True),
    "keys of all heads": lambda: attnreg.DropKey(0.3, share_heads=True),
    "tokens": lambda: attnreg.TokenDropout(0.5, 0.1),
    "rates on the device": lambda: attnreg.BernoulliScheduleProvider([(0, 0.5), (1, 0.1)], 10).to(DEVICE),
    "rows that lose all": lambda: attnreg.DropKey(0.95),
    "hidden states": lambda: attnreg.HiddenDropout(0.3) & attnreg.HiddenDropout(0.2, mode="column", where="input"),
    "together": lambda: (
        attnreg.DropHead(0.4) & DROP(0.2) & attnreg.DropKey(0.3) & attnreg.DropKey(0.2, share_queries=True)
    ),
}


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("case", MODELS)
def test_kernels_draw_the_masks_of_tensors(case, name, monkeypatch):
    make, mask = MODELS[case]
    mask = None if mask is None else mask.to(DEVICE)
    monkeypatch.setattr(fused, "KERNEL_DTYPES", (DTYPE,))
    found = []
    for runs in (True, False):
        if not runs:
            monkeypatch.setattr(kernels, "runs_on", lambda device: False)
        torch.manual_seed(0)
        model = make().to(DEVICE, DTYPE).train()
        own = "seeded" if "dropout" in case else "torch"
        handle = attnreg.attach(model, PROVIDERS[name](), own_dropout=own)
        torch.manual_seed(3)
        out = model(input_ids=IDS.to(DEVICE), attention_mask=mask).last_hidden_state.float()
        out = out if mask is None else out * mask[..., None]
        out.sin().sum().backward()
        gradients = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        found.append((out.detach(), gradients, handle.drop_rates()))
    (ours, our_gradients, our_rates), (theirs, their_gradients, their_rates) = found
    limit = 1e-5 if torch.float32 == DTYPE else 0.03
    assert (ours - theirs).norm() <= limit * theirs.norm()
    assert (our_gradients - their_gradients).norm() <= 3 * limit * their_gradients.norm()
    assert our_rates == pytest.approx(their_rates, abs=1e-6 if "hidden" not in name else 2e-2)


def test_the_models_own_dropout_draws_beside_ours(monkeypatch):
    if DEVICE.type == "cpu":
        pytest.skip("the interpreter takes tensors of a CPU, whose generator has no offset")
    model = bert(attention_probs_dropout_prob=0.5).to(DEVICE, DTYPE).train()
    attnreg.attach(model, DROP(0.0, placement="scores") & attnreg.DropKey(1e-6))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(input_ids=IDS.to(DEVICE)).last_hidden_state)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["scores", "together", "hidden states"])
def test_checkpoints_repeat_what_kernels_drew(name, reentrant, monkeypatch):
    monkeypatch.setattr(fused, "KERNEL_DTYPES", (DTYPE,))
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = bert().to(DEVICE, DTYPE).train()
        handle = attnreg.attach(model, PROVIDERS[name]())
        if checkpoints:
            options = {"use_reentrant": reentrant, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        torch.manual_seed(3)
        embedded = model.embeddings(IDS.to(DEVICE)).detach().requires_grad_()
        out = model(inputs_embeds=embedded, attention_mask=RIGHT.to(DEVICE)).last_hidden_state
        (out.float() * RIGHT.to(DEVICE)[..., None]).sin().sum().backward()
        found.append((embedded.grad, handle.drop_rates()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


B, H, N, D = 2, 2, 16, 16  # one block: several are the subject of test_kernels_attention.py
LOW = torch.finfo(DTYPE).min


class Attend(nn.Module):
    """Attention that adds a bias, which may be made of a parameter."""

    def __init__(self, bias, learns, p):
        super().__init__()
        self.qkv = nn.Linear(H * D, 3 * H * D)
        self.register_buffer("bias", bias)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=learns)
        self.p = p

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, self.bias * self.scale, self.p if self.training else 0.0)
        return x + out.transpose(1, 2).flatten(2)


class Biased(nn.Module):
    """Two such attentions, which may be in checkpoints."""

    def __init__(self, bias, *, learns=False, p=0.0, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList([Attend(bias, learns, p) for _ in range(2)])
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpoints else layer(x)
        return x


def causal(value):
    return torch.zeros(N, N).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), value)


def padded(value, mask, *lead):
    return torch.zeros(B, 1, 1, N).masked_fill(mask[:, None, None, :N] == 0, value).expand(B, *lead, N)


SLOPES = torch.tensor([0.5, 0.25]).view(H, 1, 1) * -(torch.arange(N)[:, None] - torch.arange(N)).abs()
BIASES = {
    "padding, minus infinity": padded(-torch.inf, RIGHT, 1, 1),
    "padding, finfo.min": padded(LOW, RIGHT, H, N),
    "padding, -1e4": padded(-1e4, RIGHT, 1, N),
    "padding on the left": (causal(LOW) + padded(LOW, LEFT, 1, 1)).clamp(min=LOW),
    "an empty sample": padded(LOW, RIGHT * torch.tensor([[0], [1]]), 1, 1),
    "ALiBi": SLOPES + causal(-torch.inf),
    "ALiBi, padded": SLOPES + padded(-torch.inf, RIGHT, 1, 1),
    "Swin": torch.linspace(-3, 3, N) + padded(-100.0, RIGHT, 1, 1),
}
BIASED = {
    "scores": lambda: DROP(0.3, placement="scores"),
    "keys": lambda: attnreg.DropKey(0.95),
    "weights": lambda: DROP(0.3),
    "together": lambda: attnreg.DropHead(0.4) & DROP(0.2) & attnreg.DropKey(0.3),
}


def trained(make, provider, rows=slice(None)):
    """The output of a training pass in some rows, the gradients that it gives, and drop rates."""
    torch.manual_seed(0)
    model = make().to(DEVICE, DTYPE).train()
    x = torch.randn(B, N, H * D).to(DEVICE, DTYPE).requires_grad_()
    handle = attnreg.attach(model, provider, example_inputs=[x.detach()], own_dropout="seeded")
    torch.manual_seed(3)
    out = model(x)[rows]
    out.float().sin().sum().backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return out.detach().float(), torch.cat([x.grad.float().flatten(), *gradients]), handle.drop_rates()


def counted(monkeypatch):
    """A list that grows with each call of the kernel of attention."""
    calls, attention = [], kernels.attention

    def noted(*args, **kwargs):
        calls.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(fused, "KERNEL_DTYPES", (DTYPE,))
    monkeypatch.setattr(kernels, "attention", noted)
    return calls


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "together") for case in BIASES),
        *(("padding on the left", name) for name in ("scores", "keys", "weights")),
    ],
)
def test_biases_are_added_within_the_kernel(case, name, monkeypatch):
    calls = counted(monkeypatch)
    make = functools.partial(Biased, BIASES[case], p=0.1 if name == "weights" else 0.0)
    # A kernel also drops in rows without a valid key.
    rows = (BIASES[case] > -5e3).any(-1).expand(B, H, N)[:, 0].to(DEVICE)
    assert rows.all() != (case in ("padding on the left", "an empty sample"))
    ours, our_gradients, our_rates = trained(make, BIASED[name](), rows)
    assert len(calls) == 2
    monkeypatch.setattr(kernels, "runs_on", lambda device: False)
    theirs, their_gradients, their_rates = trained(make, BIASED[name](), rows)
    assert len(calls) == 2
    limit = 1e-5 if torch.float32 == DTYPE else 0.03
    assert our_rates == pytest.approx(their_rates, abs=1e-6)
    assert (ours - theirs).norm() <= limit * theirs.norm()
    assert (our_gradients - their_gradients).norm() <= 3 * limit * their_gradients.norm()


@pytest.mark.parametrize("value", [LOW, -1e4])
def test_a_row_without_a_valid_key_attends_as_in_the_model(value, monkeypatch):
    calls = counted(monkeypatch)
    make = functools.partial(Biased, padded(value, 0 * RIGHT, 1, 1))
    ours = trained(make, DROP(1e-9))
    plain = trained(lambda: Biased(torch.zeros(N, N)), DROP(1e-9))
    assert len(calls) == 4
    for mine, other in zip(ours[:2], plain[:2], strict=True):
        assert (mine - other).norm() <= 1e-3 * other.norm()


def test_a_bias_that_is_trained_is_written_out(monkeypatch):
    calls = counted(monkeypatch)
    make = functools.partial(Biased, BIASES["ALiBi"], learns=True)
    trained(make, BIASED["together"]())
    assert not calls


@pytest.mark.parametrize("learns", [False, True])
def test_a_reentrant_checkpoint_repeats_what_a_bias_was_added_to(learns, monkeypatch):
    """Within it, nobody knows whether the bias will be trained."""
    calls = counted(monkeypatch)
    make = functools.partial(Biased, BIASES["Swin"], learns=learns, p=0.2)
    ours = trained(functools.partial(make, checkpoints=True), BIASED["together"]())
    assert not calls
    theirs = trained(make, BIASED["together"]())
    assert len(calls) == (0 if learns else 2)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert (mine - other).norm() <= (1e-5 if torch.float32 == DTYPE else 0.03) * other.norm()
    assert ours[2] == pytest.approx(theirs[2], abs=1e-6)
