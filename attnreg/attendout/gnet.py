"""G-Net, the Generator of AttendOut, which draws masks of attention scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import functional
from attnreg.arguments import InnerProbability, one_of, probability, true_or_false, whole_number
from attnreg.attendout.decisions import Decisions, Granularity, PresampledMasks, shift_to
from attnreg.attendout.network import GeneratorNetwork, TokenInputs, read_tokens
from attnreg.attendout.sizes import measure_model
from attnreg.errors import InputError
from attnreg.masks import Mask
from attnreg.regularizer import abilities
from attnreg.regularizer.providers import MaskProvider
from attnreg.sites import AttentionSite, SiteInfo


class GNetProvider(MaskProvider):
    r"""Draw masks from a small attention network that reads the tokens (AttendOut's G-Net).

    The network has token and position embeddings with LayerNorm, then applies the *same* attention layer L times,
    with G heads, a residual connection and LayerNorm. Its scores are the logits of keeping the model's scores:

    .. math::
        \begin{aligned}
        & s_{lg} = \frac{Q_{lg} K_{lg}^\top}{\sqrt{d / G}}, \\
        & x_{l+1} = \mathrm{LN}(x_l + W_O\, [\mathrm{softmax}(s_{lg}) V_{lg}]_{g=1}^G), \\
        & P(\text{keep}) = \sigma(s_{lg} + b_l)
        \end{aligned}

    :meth:`for_model` makes one for your model. Masks are drawn once at the start of a forward pass, per layer
    and sample. On the first batch (:meth:`calibrate`), :math:`b_l` is set so that the mean of :math:`P(\text{keep})` in
    layer l is ``initial_keep``; then it is learned.

    Args:
        vocab_size: number of tokens.
        hidden_size: the Generator's width d.
        num_layers: L, the number of layers of the main model.
        max_length: largest number of tokens of an input.
        initial_keep: initial mean probability of keeping a position, in ``(0, 1)``; ``None`` leaves out the bias, as
            in the paper, where P(keep) begins near 0.5.
        decisions: which units share a draw, by the mean of their logits: ``"unit"`` (none, as in the paper),
            ``"key"`` (a key, for all queries), ``"type"`` (in a layer and batch, all keys with the same token id),
            ``"word"`` (the same for all layers, so that a batch is one without this word, or with it) or ``"batch"`` (a
            layer, or a head of it). With fewer decisions, the reward tells more about each.
        masks_per_layer: number of independent draws from the same probabilities: 1, as in the paper, for one mask that
            all heads share, or the main model's number of heads. It must be 1 if ``num_heads`` is not.
        num_heads: G: 1, as in the paper, or the main model's number of heads; head h of the G-Net, with other
            probabilities, then masks head h of the model.
        causal: mask a causal (decoder) stack instead of an encoder.
        position_offset: index of the first position's embedding.
        pad_token_id: token id of padding, for models that get no ``attention_mask``.

    Shape:
        masks are ``(B, M, N, N)`` for inputs ``(B, N)``, where M is 1 or the number of heads; multiple-choice inputs
        ``(B, C, N)`` count as ``(B * C, N)``.

    Raises:
        InputError: if an argument is out of range, or two are at odds; when attached, if the model has another
            number of layers or heads; in a forward pass, if the inputs have no token ids or are too long.

    Reference:
        AttendOut (arXiv 2104.04692), Section 4.1.

    Example:
        >>> generator = GNetProvider(vocab_size=10, hidden_size=4, num_layers=2)
        >>> generator.prepare({"input_ids": torch.tensor([[1, 2, 3]])})
        >>> generator.keep.shape
        torch.Size([1, 2, 1, 3, 3])
        >>> generator(AttentionSite(shape=(1, 8, 3, 3), layer=1, num_layers=2)).scores.shape
        torch.Size([1, 1, 3, 3])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        max_length: int = 512,
        *,
        initial_keep: InnerProbability | None = 0.9,
        decisions: Granularity = "unit",
        masks_per_layer: int = 1,
        num_heads: int = 1,
        causal: bool = False,
        position_offset: int = 0,
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = whole_number("vocab_size", vocab_size)
        self.hidden_size = whole_number("hidden_size", hidden_size)
        self.num_layers = whole_number("num_layers", num_layers)
        self.max_length = whole_number("max_length", max_length)
        self.masks_per_layer = whole_number("masks_per_layer", masks_per_layer)
        self.num_heads = whole_number("num_heads", num_heads)
        self.initial_keep = None if initial_keep is None else probability("initial_keep", initial_keep, "(0, 1)")
        self.decisions = one_of("decisions", decisions, get_args(Granularity))
        self.decides_for_batch = decisions not in ("unit", "key")
        if masks_per_layer > 1 < num_heads:
            raise InputError(
                f"Expected `masks_per_layer` to be 1 with `num_heads` {num_heads}, because every head has a draw "
                f"already, got {masks_per_layer}."
            )
        self.causal = true_or_false("causal", causal)
        self._stack = "decoder" if causal else "encoder"
        self.position_offset = whole_number("position_offset", position_offset, least=0)
        self.pad_token_id = None if pad_token_id is None else whole_number("pad_token_id", pad_token_id, least=0)
        self.network = GeneratorNetwork(
            vocab_size,
            hidden_size,
            num_layers,
            max_length + position_offset,
            num_heads,
            initial_logit=None if initial_keep is None else math.log(initial_keep / (1 - initial_keep)),
            position_offset=position_offset,
        )
        self.keep: Tensor | None = None
        self._presampled = PresampledMasks()
        self._sampled: Tensor | None = None  # ids of the inputs that `sample` drew masks for, until they have run
        self._has_learned = False  # whether logits with gradients were computed, or the weights were loaded
        #: whether the biases have been set to ``initial_keep``, or there are none
        self.calibrated = initial_keep is None

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        *,
        initial_keep: InnerProbability | None = 0.9,
        decisions: Granularity = "unit",
        masks_per_layer: int | str = 1,
        num_heads: int | str = 1,
        example_inputs: Any = None,
    ) -> GNetProvider:
        """Make a G-Net with the model's depth, on its device, with copies of its token and position embeddings.

        Args:
            model: a model that takes token ids. If it has no table of absolute positions, or none with a known name,
                positions are learned from scratch.
            initial_keep: as in :class:`GNetProvider`.
            decisions: likewise.
            masks_per_layer: likewise; ``"heads"`` stands for the model's number of heads.
            num_heads: likewise.
            example_inputs: as in :func:`attnreg.attach`.

        Raises:
            InputError: if the model has no single table of token embeddings; with ``"heads"``, if its layers differ in
                heads.
            NoAttentionError: if the model has no attention that attnreg knows.

        Example:
            >>> from transformers import BertConfig, BertModel
            >>> config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=3, num_attention_heads=2)
            >>> generator = GNetProvider.for_model(BertModel(config), masks_per_layer="heads")
            >>> generator.num_layers, generator.hidden_size, generator.max_length, generator.masks_per_layer
            (3, 8, 512, 2)
        """
        measured = measure_model(model, example_inputs)
        generator = cls(
            **measured.sizes,
            initial_keep=initial_keep,
            decisions=decisions,
            masks_per_layer=measured.number("masks_per_layer", masks_per_layer),
            num_heads=measured.number("num_heads", num_heads),
        )
        with torch.no_grad():
            for name, weight in measured.weights.items():
                generator.network.get_parameter(name).copy_(weight)
        return generator.to(measured.device)

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        if site.stack != self._stack:
            return None
        self._check_heads(site)
        if (keep := self.keep) is None:
            raise RuntimeError("No masks were drawn for this forward pass: call the attached model, not a part of it.")
        if (site.shape[0], *site.shape[2:]) != (keep.shape[0], *keep.shape[3:]):
            raise InputError(
                f"G-Net masks self-attention over the model's {keep.shape[0]} inputs of {keep.shape[3]} "
                f"tokens, but {site.name} has (B, H, Q, K) = {tuple(site.shape)}: attach it to other `modules`."
            )
        return Mask(scores=keep[:, site.layer])

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        sites = [site for site in sites if site.stack == self._stack]
        depths = {site.num_layers for site in sites}
        if depths != {self.num_layers}:
            raise InputError(
                f"This G-Net was made for {self.num_layers} {self._stack} layers, but the model has "
                f"{depths.pop() if depths else 'none'}: use `GNetProvider.for_model(model)`."
            )
        for site in sites:
            self._check_heads(site)

    def _check_heads(self, site: SiteInfo) -> None:
        for name, number in (("masks_per_layer", self.masks_per_layer), ("num_heads", self.num_heads)):
            if site.heads is not None and number not in (1, site.heads):
                raise InputError(f"Expected `{name}` to be 1 or {site.heads}, the heads of {site.name}, got {number}.")

    @override
    def why_asleep(self, passes: int) -> str | None:
        if passes < abilities.PATIENCE or self._has_learned or not any(p.requires_grad for p in self.parameters()):
            return None
        return (
            f"{type(self).__name__} has not learned in {passes} training passes: train it by `AttackerDefender`, load "
            "a trained one, or say that it is random by `requires_grad_(False)`."
        )

    def learned_parameters(self) -> list[nn.Parameter]:
        """Return none: masks have no gradient, and AttendOut has a separate optimizer for the G-Net."""
        return []

    @torch.no_grad()
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Draw the masks of all layers for one forward pass of the main model, and store them in ``keep``."""
        if not self._presampled.begin_pass():
            self.keep = self._calibrated_decisions(inputs).draw()
        elif self._sampled is not None and not torch.compiler.is_compiling():
            if not torch.equal(self._read(inputs).ids, self._sampled):
                raise InputError("This forward pass has other inputs than `sample`, which drew its masks.")
            self._sampled = None

    def sample(self, inputs: Mapping[str, Any]) -> Tensor:
        """Draw the masks of the model's next forward pass, on the same inputs, and return their :meth:`log_prob`."""
        decisions = self._calibrated_decisions(inputs)
        self.keep, self._sampled = decisions.draw(), self._read(inputs).ids
        self._presampled.offer()
        return decisions.log_prob(self.keep)

    @torch.no_grad()
    def keep_probability(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the units' probabilities of being kept, ``(B, L, G, N, N)``."""
        return self._decisions(inputs).probability()

    @torch.no_grad()
    def calibrate(self, inputs: Mapping[str, Any]) -> None:
        """Set the biases of layers so that decisions keep with a mean probability of ``initial_keep``.

        The first training pass does this, unless the G-Net was loaded.
        """
        if self.initial_keep is None:
            return
        if torch.compiler.is_exporting():
            raise RuntimeError("GNetProvider is calibrated in its first training pass: run one before `torch.export`.")
        decisions = self._decisions(inputs)
        logits, valid = decisions.logits, decisions.valid
        bias = self.network.bias.view(logits.shape[1], -1)  # layers that decide together get the same bias
        for layer, shifts in enumerate(bias) if valid.any() else ():
            unbiased = logits[:, layer] - shifts.mean()
            shifts.fill_(shift_to(self.initial_keep, unbiased[valid[:, 0].expand(unbiased.shape)]))
        self.calibrated = True

    def _calibrated_decisions(self, inputs: Mapping[str, Any]) -> Decisions:
        if not self.calibrated:
            self.calibrate(inputs)
        return self._decisions(inputs)

    def _decisions(self, inputs: Mapping[str, Any]) -> Decisions:
        types = self._read(inputs).ids if self.decisions in ("type", "word") else None
        logits, units = self.logits(inputs), self.units(inputs)
        return Decisions(self.decisions, self.masks_per_layer, logits, units, types, self.vocab_size)

    def _read(self, inputs: Mapping[str, Any]) -> TokenInputs:
        return read_tokens(inputs, self.max_length, self.pad_token_id, causal=self.causal)

    @override
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calibrated, device=self.network.bias.device)

    @override
    def set_extra_state(self, state: Tensor) -> None:
        self.calibrated, self._has_learned = bool(state), True

    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """Compute the logits of keeping the units, ``(B, L, G, N, N)``.

        Args:
            inputs: the main model's inputs: ``input_ids`` ``(B, N)`` (or else the first integer tensor of at least two
                dimensions) and, optionally, ``attention_mask`` ``(B, N)``.
        """
        tokens = self._read(inputs)
        self._has_learned |= torch.is_grad_enabled()
        try:
            return self.network(tokens.ids, tokens.allowed)
        except IndexError as error:
            if int(tokens.ids.max()) < self.vocab_size:
                raise
            raise InputError(
                f"Expected token ids below {self.vocab_size}, as in the G-Net's table, got "
                f"{int(tokens.ids.max())}: make a new G-Net once the model's embeddings are resized."
            ) from error

    def units(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the valid units, ``(B, N, N)``, bool: real keys of real query rows."""
        allowed = self._read(inputs).allowed
        return functional.units(allowed, allowed.shape)

    def log_prob(self, inputs: Mapping[str, Any], keep: Tensor) -> Tensor:
        r"""Compute :math:`(1/n) \sum \log P(d)` over the decisions of all layers, ``(B,)``, differentiable.

        ``keep`` are the masks drawn for these inputs of the main model, bool, ``(B, L, M, N, N)``.
        """
        return self._decisions(inputs).log_prob(keep)
