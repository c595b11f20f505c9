"""Providers of one's own: their masks are repeated if they draw from the site, and refused otherwise."""

import pytest
import torch

import attnreg
from tests.test_repeating import IDS, bert


class Own(attnreg.MaskProvider):
    """Draws from torch's own generator, or as it should."""

    def __init__(self, *, rightly):
        super().__init__()
        self.rightly = rightly

    def forward(self, site):
        return attnreg.Mask(scores=site.keep(0.4) if self.rightly else torch.rand(site.shape) > 0.4)


class OwnNoise(attnreg.HiddenProvider):
    def forward(self, site, states):
        return states + torch.randn(states.shape)


class OwnPreparation(attnreg.HiddenProvider):
    def prepare(self, inputs):
        self.factor = torch.rand(())

    def forward(self, site, states):
        return states * self.factor


class OwnSkips(attnreg.LayerDrop):
    def skips_block(self, site, draws):
        return torch.rand(()) < 0.5


@pytest.mark.parametrize(
    "provider", [Own(rightly=False), OwnNoise(), OwnPreparation(), OwnSkips()], ids=lambda p: type(p).__name__
)
def test_masks_from_torchs_own_generator_are_not_repeated(provider):
    model = bert()
    with attnreg.attach(model, attnreg.DropKey(0.2) & provider) as handle, torch.no_grad():
        with torch.enable_grad():
            model(input_ids=IDS)
        with (
            pytest.raises(RuntimeError, match="cannot be repeated, because it draws from torch's own generator"),
            handle.replay(),
        ):
            model(input_ids=IDS)


def test_a_provider_of_ones_own_is_repeated():
    model = bert()
    with attnreg.attach(model, Own(rightly=True)) as handle:
        logits = model(input_ids=IDS).logits
        with torch.no_grad(), handle.replay():
            assert torch.equal(model(input_ids=IDS).logits, logits)
