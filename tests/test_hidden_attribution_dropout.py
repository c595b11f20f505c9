"""HiddenAttributionDropout against finite differences and loops, in float64."""

import functools

import torch

import attnreg
from attnreg import HiddenAttributionDropout
from tests.helpers.cases import NO_DROPOUT, bert_in_float64
from tests.helpers.formulas import slow_region
from tests.helpers.reference import close

BATCH = {
    "input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    "labels": torch.tensor([0, 2]),
}
bert = functools.partial(bert_in_float64, **NO_DROPOUT, hidden_size=6, num_attention_heads=2, num_labels=3)
EVERYWHERE = ["embeddings", "input", "output", "pooled"]


def states_changed(model, label, change):
    """The logits when the states at a site are changed, and these states, by a hook of this test."""
    layers, seen = model.bert.encoder.layer, []

    def changed(states):
        seen.append(states)
        return change(states)

    def at_input(module, args):
        return changed(args[0]), *args[1:]

    def at_output(module, args, output):
        return (changed(output[0]), *output[1:]) if isinstance(output, tuple) else changed(output)

    module = model.classifier if label == "pooled" else layers[int(label.split(".")[1])]
    at_end = label.endswith("output")
    hook = module.register_forward_hook(at_output) if at_end else module.register_forward_pre_hook(at_input)
    try:
        with torch.no_grad():
            return model.eval()(**BATCH).logits, seen[0].clone()
    finally:
        hook.remove()


def test_attributions_are_value_times_derivative():
    model = bert()
    provider = HiddenAttributionDropout(where=EVERYWHERE)
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, BATCH)
        labels = [site.label for site in handle.sites]
    assert sorted(provider.attributions) == sorted(labels)
    assert len(labels) == 1 + 2 + 2 + 1
    logits, _ = states_changed(model, "pooled", lambda states: states)
    classes = logits.argmax(-1)
    step = 1e-5
    for label in labels:
        _, states = states_changed(model, label, lambda states: states)
        slow = torch.zeros_like(states)
        for place in torch.cartesian_prod(*map(torch.arange, states.shape)).tolist():
            scores = []
            for sign in (1, -1):
                shift = torch.zeros_like(states)
                shift[tuple(place)] = sign * step
                moved, _ = states_changed(model, label, lambda states, shift=shift: states + shift)
                scores.append(sum(float(moved[b, c]) for b, c in enumerate(classes.tolist())))
            slow[tuple(place)] = states[tuple(place)] * (scores[0] - scores[1]) / (2 * step)
        assert torch.allclose(provider.attributions[label], slow, atol=1e-9), label
        assert slow.abs().max() > 1e-4


def test_only_candidates_are_dropped():
    model, p, q = bert(), 0.5, 0.4
    provider = HiddenAttributionDropout(p, q)
    site = attnreg.HiddenSite(name="block", shape=(2, 4, 6), dtype=torch.float64)
    real = BATCH["attention_mask"].bool()[:, None, :, None].expand(2, 1, 4, 6)  # padding has no ranking
    kept, drawn = 1 / (1 - q), []
    with attnreg.attach(model, provider):
        for _ in range(40):
            provider.attribute(model, BATCH)
            provider.prepare(BATCH)
            states = torch.rand(2, 4, 6, dtype=torch.float64) + 1
            ratio = provider(site, states) / states
            candidates = slow_region(provider.attributions["encoder.0.output"][:, None], real, p, "high")[:, 0]
            assert candidates.sum() == 6 * 3
            torch.testing.assert_close(ratio[~candidates], torch.ones_like(ratio[~candidates]))
            drawn.append(ratio[candidates])
    drawn = torch.cat(drawn)
    torch.testing.assert_close(drawn[drawn != 0], torch.full_like(drawn[drawn != 0], kept))
    assert close((drawn == 0).double().mean(), q, len(drawn))
