"""R3F against its formula in float64, with the noise given by another way into the model."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from attnreg.training import FineTuning, R3FLoss
from tests.helpers.formulas import slow_symmetric_kl
from tests.helpers.method_cases import assert_stepped, bert, sgd
from tests.helpers.objectives import IDS, MASK, PADDED, Recorder, heads


def noise_like(embedded, kind, eps):
    if kind == "normal":
        return torch.randn(embedded.shape, dtype=embedded.dtype) * eps
    return (torch.rand(embedded.shape, dtype=embedded.dtype) * 2 - 1) * eps


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@heads
def test_a_step_follows_the_gradient_of_the_papers_loss(kind, head, options, labels):
    model = bert(head, **options)
    before = copy.deepcopy(model).train()
    batch = {**PADDED, "labels": labels}
    torch.manual_seed(1)
    clean = before(**batch)
    embedded = before.get_input_embeddings()(IDS)
    noise = noise_like(embedded, kind, 0.3) * MASK[..., None]
    noised = before(inputs_embeds=embedded + noise, attention_mask=MASK).logits
    if options["num_labels"] == 1:
        difference = (clean.logits - noised).square().mean()
    else:
        kept = labels != -100 if labels.dim() == 2 else slice(None)
        p, q = clean.logits[kept].softmax(-1), noised[kept].softmax(-1)
        difference = (p * (p / q).log()).sum(-1).mean() + (q * (q / p).log()).sum(-1).mean()
        slow = 2 * slow_symmetric_kl(clean.logits[kept].detach(), noised[kept].detach())
        assert difference.item() == pytest.approx(slow, abs=1e-12)
    loss = clean.loss + 0.7 * difference
    method = FineTuning(model, sgd(model), objective=R3FLoss(0.7, 0.3, kind), max_grad_norm=None)
    torch.manual_seed(1)
    assert method.step(batch).loss.item() == pytest.approx(loss.item(), abs=1e-12)
    assert_stepped(model, before, loss)
    assert not model.get_input_embeddings()._forward_hooks


def added(model, batch, **options):
    """What a step adds to what the model looks up, in each call of the second pass."""
    objective = R3FLoss(**options)
    weight = model.get_input_embeddings().weight
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is weight]

    def looked_up():
        seen = []  # hooks that come last see what others have added
        hooks = [each.register_forward_hook(lambda *args: seen.append(args[-1])) for each in tables]
        model(**batch)
        for hook in hooks:
            hook.remove()
        return seen

    with torch.no_grad():
        clean = looked_up()
        with objective.noised(model, batch, objective._draw_noise):
            return [after - before for before, after in zip(clean, looked_up(), strict=True)]


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_noise_has_its_size_and_leaves_padding_alone(kind):
    torch.manual_seed(0)
    ids, lengths = torch.randint(1, 20, (64, 32)), torch.randint(1, 33, (64, 1))
    mask = torch.arange(32) < lengths
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    (noise,) = added(bert(), batch, eps=0.5, noise=kind)
    assert (noise[~mask] == 0).all()
    real = noise[mask].flatten()
    deviation = 0.5 if kind == "normal" else 0.5 / 3**0.5
    assert abs(real.mean().item()) < 5 * deviation / len(real) ** 0.5
    assert real.std().item() == pytest.approx(deviation, rel=5 / len(real) ** 0.5)
    assert (real.abs().max() <= 0.5) == (kind == "uniform")
    assert real.unique().numel() > 0.99 * len(real)


def test_of_two_sequences_only_the_input_gets_noise():
    config = hf.T5Config(vocab_size=20, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = hf.T5ForConditionalGeneration(config).eval()
    batch = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS.flip(1)}
    encoder, decoder = added(model, batch, eps=0.5)
    assert ((encoder != 0).any(-1) == (MASK == 1)).all()
    assert (decoder == 0).all()


def test_other_layouts_of_the_tokens():
    config = hf.XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8)
    (noise,) = added(hf.XLNetForSequenceClassification(config).eval(), {"input_ids": IDS, "attention_mask": MASK})
    assert ((noise != 0).any(-1) == (MASK.T == 1)).all()
    choices = {name: PADDED[name].view(1, 3, 4).repeat(2, 1, 1) for name in ("input_ids", "attention_mask")}
    (noise,) = added(bert(hf.BertForMultipleChoice).eval(), choices)
    assert ((noise != 0).any(-1) == (MASK == 1).repeat(2, 1)).all()


def test_the_penalty_is_that_of_the_pass_without_noise():
    model, provider = bert(dropout=0.0, num_labels=3), Recorder()
    loss = FineTuning(model, sgd(model), provider, objective=R3FLoss(weight=0.0)).step(PADDED).loss
    assert provider.prepared == 2
    assert 2 < loss < 2 + 2  # the masks of two layers, and a cross-entropy


def test_what_has_no_place_for_the_noise_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"`get_input_embeddings\(\)`, which Linear does not have"):
        FineTuning(model, sgd(model), objective=R3FLoss())
    model = bert(num_labels=3)
    method = FineTuning(model, sgd(model), objective=R3FLoss())
    with pytest.raises(ValueError, match="pass `input_ids`, and an `attention_mask` of their shape"):
        method.step({"inputs_embeds": torch.zeros(1, 2, 16).double(), "labels": torch.tensor([1])})
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with pytest.raises(ValueError, match="did not look up the batch's `input_ids`"):
        method.step(PADDED)
    with pytest.raises(ValueError, match="pass `input_ids`, and an `attention_mask` of their shape"):
        method.step({**PADDED, "attention_mask": MASK[:, None, None].bool()})
