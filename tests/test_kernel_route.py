"""Attached models whose masks are drawn within kernels compute what they compute with masks of tensors."""

import pytest
import torch
import transformers as hf

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
