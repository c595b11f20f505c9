"""Regularizers that watch, scale or cost, for tests."""

import os

import torch
from torch import nn

import attnreg


class Watch(attnreg.MaskProvider):
    """Notes each site, and what another provider drops there."""

    def __init__(self, provider):
        super().__init__()
        self.provider, self.seen = provider, {}

    def forward(self, site):
        mask = self.provider(site)
        self.seen[site.label] = site, ~mask.scores
        return mask


class Scale(attnreg.HiddenProvider):
    """Multiplies states by a factor, and remembers what it was asked."""

    def __init__(self, where, factor=1.0):
        super().__init__()
        self.where, self.factor = where, factor
        self.seen = []

    def forward(self, site, states):
        self.seen.append((site, states.detach().clone()))
        return None if self.factor == 1 else states * self.factor


class Costly(attnreg.MaskProvider):
    """Masks nothing, and costs a quarter."""

    def forward(self, site):
        return None

    def penalty(self):
        return torch.tensor(0.25)


class Learned(attnreg.MaskProvider):
    """Weighs attention by a number that it learns and that has a price."""

    def __init__(self, price=1.0):
        super().__init__()
        self.price = price
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, site):
        return attnreg.Mask(weights=self.factor)

    def penalty(self):
        return self.price * self.factor**2


class Priced(attnreg.MaskProvider):
    """Drops nothing; has two numbers at a constant price, the second in the first process only."""

    def __init__(self):
        super().__init__()
        self.everywhere = nn.Parameter(torch.tensor(0.5))
        self.in_first = nn.Parameter(torch.tensor(0.5))

    def forward(self, site):
        return None

    def penalty(self):
        rank = int(os.environ.get("RANK", 0))
        return self.everywhere * (1 + 2 * rank) + (0 if rank else self.in_first)
