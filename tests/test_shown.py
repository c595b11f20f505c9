"""What a handle shows: rates with four digits, tables in notebooks, tokens with what is dropped of each."""

import re

import pytest
import torch

import attnreg
from attnreg.errors import InputError
from tests.helpers.learning import bert

BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 0, 0], [9, 8, 7, 6, 5, 4]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]),
}


class Third(attnreg.MaskProvider):
    """Drops the third key in the first head of the first layer."""

    def forward(self, site):
        keep = torch.ones(site.shape, dtype=torch.bool)
        keep[:, 0, :, 2] = site.layer > 0
        return attnreg.Mask(scores=keep)


def test_the_tokens_of_a_sample_show_what_is_dropped_of_each():
    model = bert().train()
    handle = attnreg.attach(model, Third())
    heads = model.config.num_attention_heads
    model(**BATCH)
    rates, state = handle.drop_rates(), torch.get_rng_state()
    shown = handle.show(BATCH)
    table = [line.split() for line in str(shown).splitlines()[:-1]]
    assert [row[0] for row in table] == ["token", "5", "6", "7", "8"]  # no padding
    first = table[0].index("encoder.0")
    assert [row[first] for row in table[1:]] == ["0%", "0%", f"{round(100 / heads)}%", "0%"]
    layers = len(handle.sites)
    assert table[3][1] == f"{round(100 / heads / layers)}%"
    assert re.findall(r">(\w+)</span>", shown._repr_html_()) == ["5", "6", "7", "8"]
    # no trace
    assert handle.drop_rates() == rates
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not {"mask_at", "states_at"} & vars(handle.provider).keys()


def test_masks_of_the_same_seed_are_the_same():
    handle = attnreg.attach(bert().train(), attnreg.DropKey(0.5, share_heads=True, share_queries=True))
    one, same, other = (handle.show(BATCH, row=1, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert {cell for row in one.rows[1:] for cell in row[2:]} == {"0%", "100%"}


def test_hidden_states_count_and_what_drops_nothing_is_told_or_refused():
    handle = attnreg.attach(bert().train(), attnreg.HiddenDropout(0.5))
    assert "%" in handle.show(BATCH)
    handle.detach()
    handle = attnreg.attach(bert().train(), attnreg.RelaxedAttention(0.5))
    assert "RelaxedAttention spreads attention; it drops nothing by design." in handle.show(BATCH)
    handle.detach()
    handle = attnreg.attach(bert().train(), attnreg.CrossTuning(attnreg.DropKey(0.5)))
    with pytest.raises(InputError, match="is not active in this epoch"):
        handle.show(BATCH)
    with pytest.raises(InputError, match="Expected a batch with `input_ids`"):
        handle.show({"inputs_embeds": torch.zeros(1, 3, 8)})


def test_rates_have_four_digits_and_reports_are_tables_in_notebooks():
    model = bert().train()
    handle = attnreg.attach(model, attnreg.DropHead(0.3))
    model(**BATCH)
    rates = handle.drop_rates()
    assert rates == dict(rates)  # of all digits
    assert all(re.fullmatch(r"'encoder.\d': \d\.\d{4}", each) for each in repr(rates).strip("{}").split(", "))
    page = handle.report()._repr_html_()
    assert page.count("<tr>") == 1 + len(handle.sites)
    assert "<th" in page
    assert "encoder.0" in page
    assert "<table>" in attnreg.doctor(model)._repr_html_()
