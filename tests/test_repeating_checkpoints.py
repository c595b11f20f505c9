"""One seed, one mask: in passes that gradient checkpointing repeats."""

import functools

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.helpers.repeated import IDS, SEED, bert, composed


def checkpointing(model, *, preserve):
    options = {"use_reentrant": False, "preserve_rng_state": preserve}
    for block in model.bert.encoder.layer:
        block.forward = functools.partial(checkpoint, block.forward, **options)


def one_of_two(which):
    """Two passes before the backward pass of one; no pass waits for its backward pass when these steps have ended."""

    def steps(model, handle):
        [model(input_ids=IDS).logits.sum() for _ in range(2)][which].backward()

    return steps


def one_after_another(model, handle):
    for _ in range(2):  # gradients of two batches are accumulated
        model(input_ids=IDS).logits.sum().backward()
    model(input_ids=IDS)  # whose gradients nobody wants
    handle.step()
    model(input_ids=IDS).logits.sum().backward()


@pytest.mark.parametrize("steps", [one_of_two(0), one_of_two(1), one_after_another])
def test_checkpoints_repeat_the_masks_of_several_passes_with_and_without_the_generator(steps):
    gradients = []
    for preserve in (None, True, False):
        model = bert()
        with attnreg.attach(model, composed()) as handle:
            if preserve is not None:
                checkpointing(model, preserve=preserve)
            torch.manual_seed(SEED)
            steps(model, handle)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients, strict=True))


def test_layers_that_share_a_module_may_share_a_checkpoint():
    gradients = []
    for wrapped in (False, True):
        model = hf.AlbertModel(hf.AlbertConfig(vocab_size=20, embedding_size=16, hidden_size=16, num_hidden_layers=3,
            num_attention_heads=2, intermediate_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for weight in model.parameters():
                nn.init.normal_(weight, std=0.3)
        with attnreg.attach(model.train(), composed()):
            if wrapped:
                model.encoder.forward = functools.partial(checkpoint, model.encoder.forward, use_reentrant=False)
            torch.manual_seed(SEED)
            losses = [model(input_ids=IDS).last_hidden_state.square().sum() for _ in range(2)]
            for loss in losses:
                loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_masks_of_tokens_belong_to_the_latest_pass():
    model = bert()
    with attnreg.attach(model, attnreg.TokenDropout(0.5)):
        checkpointing(model, preserve=True)
        losses = [model(input_ids=IDS).logits.sum() for _ in range(2)]
        with pytest.raises(RuntimeError, match="TokenDropout draws its masks when a forward pass begins, and gradient"):
            losses[0].backward()
        del losses


def test_what_follows_the_model_within_a_checkpoint_draws_the_same():
    gradients = []
    for wrapped in (False, True):
        model = bert()
        head = nn.Linear(2, 2, dtype=torch.float32)
        nn.init.eye_(head.weight)

        def run(vectors, model=model, head=head):
            return head(nn.functional.dropout(model(inputs_embeds=vectors).logits, 0.5))

        with attnreg.attach(model, composed()):
            torch.manual_seed(SEED)
            vectors = model.get_input_embeddings()(IDS)
            out = checkpoint(run, vectors, use_reentrant=False) if wrapped else run(vectors)
            out.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-7)
