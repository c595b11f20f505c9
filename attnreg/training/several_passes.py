"""Objectives of several forward passes: R-Drop; on other token embeddings, R3F, FreeLB and FGM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from attnreg import functional
from attnreg.arguments import NotNegative, not_negative, one_of, whole_number
from attnreg.draws import new_seed
from attnreg.errors import InputError
from attnreg.injection import draws_repeated
from attnreg.regularizer.base import Regularizer
from attnreg.regularizers.noise import Rounding
from attnreg.training.method import LOSS_SCALE, Batch
from attnreg.training.objective import ForwardPass, Objective

NoiseKind = Literal["uniform", "normal"]
# Returns noise for embeddings, from a bool mask of the tokens that are no padding, (B, T, 1), and T's dimension, 1; in
# a model that transposes tokens (XLNet), (T, B, 1) and 0.
Noise = Callable[[Tensor, Tensor, int], Tensor]


class RDropLoss(Objective):
    r"""The loss of two forward passes under different dropout, and of the difference between their predictions.

    .. math:: \mathcal L = \tfrac12 \Big( \mathcal L_1 + \mathcal L_2 + \alpha \cdot
        \tfrac12 \big( \mathrm{KL}(P_1 \| P_2) + \mathrm{KL}(P_2 \| P_1) \big) \Big)

    This is half of the paper's loss, so that learning rate and gradient clipping keep their meaning without R-Drop. The
    two passes differ in the model's dropout and in the provider's masks.

    Args:
        alpha: weight of the difference between the two predictions.

    Raises:
        InputError: if an argument is out of range, or the provider does not allow two passes (:class:`ForwardPass`). In
            a step: if there are no logits, or the labels do not fit them.

    Reference:
        R-Drop (NeurIPS 2021, arXiv 2106.14448), Eq. 1 to 4 and Algorithm 1.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> from attnreg.training import FineTuning
        >>> method = FineTuning(model, torch.optim.SGD(model.parameters(), lr=0.1), objective=RDropLoss(alpha=0.5))
        >>> method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}).loss.shape
        torch.Size([])
    """

    title = "R-Drop"
    passes = 2

    def __init__(self, alpha: NotNegative = 1.0) -> None:
        self.alpha = not_negative("alpha", alpha)

    @override
    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        (first, logits), (second, other) = (forward.predict(batch) for _ in range(2))
        return (first + second + self.alpha * forward.disagreement(batch, logits, other)) / 2


class EmbeddingObjective(Objective):
    """An objective whose forward passes have other token embeddings."""

    passes = 2

    def __init__(self) -> None:
        self._rounding = Rounding(self.title)

    @override
    def check(self, model: nn.Module, provider: Regularizer | None) -> None:
        super().check(model, provider)
        self._embeddings_of(model)

    @contextmanager
    def noised(self, model: nn.Module, batch: Batch, noise: Noise) -> Iterator[None]:
        """Add noise to the embeddings of the batch's tokens, within the block."""
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is None or (mask is not None and mask.shape != ids.shape):
            raise InputError(
                f"{self.title} adds noise to the embeddings of tokens that are no padding: pass `input_ids`, and an "
                f"`attention_mask` of their shape if there is padding, in the batch {sorted(batch)}."
            )
        is_added = False

        def add(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], embedded: Tensor) -> Tensor | None:
            nonlocal is_added
            tokens = _tokens((*args, *kwargs.values())[0], batch)
            if tokens is None:
                return None  # other tokens, such as a decoder's
            is_added = True
            return self._rounding.add(embedded, noise(embedded, *tokens))

        embeddings = self._embeddings_of(model)
        inside, weight = set(embeddings.modules()), getattr(embeddings, "weight", None)
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module not in inside)
        with ExitStack() as hooks:
            for module in (embeddings, *(table for table in tables if table.weight is weight)):  # T5 has several
                hooks.enter_context(module.register_forward_hook(add, with_kwargs=True))
            yield
        if not is_added:
            raise InputError(
                f"{self.title} could not add noise, because {type(model).__name__} did not look up the batch's "
                "`input_ids` in `get_input_embeddings()`. Train with `RDropLoss` instead."
            )

    def _embeddings_of(self, model: nn.Module) -> nn.Module:
        try:
            embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        except (NotImplementedError, AttributeError):
            embeddings = None
        if not isinstance(embeddings, nn.Module):
            name = type(model).__name__
            raise InputError(f"{self.title} adds noise to `get_input_embeddings()`, which {name} does not have.")
        return embeddings


def _tokens(ids: Tensor, batch: Batch) -> tuple[Tensor, int] | None:
    """Return two arguments of :data:`Noise`; ``None`` if the looked-up tokens are not the batch's."""
    batch_ids = batch["input_ids"].flatten(0, -2)
    mask = batch.get("attention_mask")
    real = torch.ones_like(batch_ids, dtype=torch.bool) if mask is None else mask.flatten(0, -2).bool()
    for tokens, positions, dim in ((batch_ids, real, 1), (batch_ids.T, real.T, 0)):
        length = tokens.shape[1]
        if ids.dim() == 2 and len(ids) == len(tokens) and _are_equal(ids[:, :length], tokens):
            padded = F.pad(positions, (0, ids.shape[1] - length))  # Longformer pads inputs further
            return padded[..., None], dim
    return None


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, without waiting for a GPU if they are in the same memory."""
    alike = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    if alike and not torch.compiler.is_compiling() and a.data_ptr() == b.data_ptr() != 0:
        return True
    return torch.equal(a, b)


class R3FLoss(EmbeddingObjective):
    r"""The loss of a forward pass, and of the difference between its predictions and those with noise on embeddings.

    .. math:: \mathcal L = \mathcal L(x) + \lambda \big( \mathrm{KL}(P_x \| P_{x + z}) +
        \mathrm{KL}(P_{x + z} \| P_x) \big), \qquad z \sim \mathcal U(-\epsilon, \epsilon)
        \text{ or } \mathcal N(0, \epsilon^2)

    z is added to the token embeddings of all real positions. For a model with one output (regression), the mean squared
    difference of the two scores replaces the two KL terms. The loss and the provider's penalty come from the pass
    without noise. Each pass draws new dropout and masks, as in the authors' code: with the paper's
    :math:`\epsilon = 10^{-5}`, the two predictions differ mostly by dropout, as in :class:`RDropLoss`.

    Args:
        weight: weight of the difference between the two predictions (lambda in the paper).
        eps: size of the noise: bound of "uniform", standard deviation of "normal".
        noise: distribution of the noise, "uniform" or "normal".

    Raises:
        InputError: as :class:`RDropLoss`, or if the model does not look up the batch's ``input_ids`` in its
            ``get_input_embeddings()``.

    Warns:
        UserWarning: if most of the noise is lost, because the embeddings are in half precision.

    Reference:
        R3F (Aghajanyan et al., ICLR 2021, arXiv 2008.03156), Section 3, without R4F's spectral normalization. The
        authors' code also adds the noise at padding, and leaves regression without the term.

    Example:
        >>> objective = R3FLoss(weight=0.5, eps=0.1, noise="normal")  # used as RDropLoss
        >>> objective.passes
        2
    """

    title = "R3F"

    def __init__(self, weight: NotNegative = 1.0, eps: NotNegative = 1e-5, noise: NoiseKind = "uniform") -> None:
        self.weight = not_negative("weight", weight)
        self.eps = not_negative("eps", eps)
        self.noise = one_of("noise", noise, get_args(NoiseKind))
        super().__init__()

    @override
    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        loss, logits = forward.predict(batch)
        with self.noised(forward.model, batch, self._draw_noise):
            _, other = forward.predict(batch)
        directions = 1 if logits.shape[-1] == 1 else 2  # `disagreement` is the mean of both
        return loss + self.weight * directions * forward.disagreement(batch, logits, other)

    def _draw_noise(self, embedded: Tensor, real: Tensor, dim: int) -> Tensor:
        noise = torch.randn_like(embedded) if self.noise == "normal" else 2 * torch.rand_like(embedded) - 1
        return (self.eps * noise).masked_fill(~real, 0.0)


class FreeLBLoss(EmbeddingObjective):
    r"""The mean loss of several forward passes, on token embeddings that move up the gradient of the loss.

    .. math:: \mathcal L = \frac1K \sum_{t=0}^{K-1} \mathcal L(x + \delta_t), \qquad
        \delta_{t+1} = \Pi_\epsilon \Big( \delta_t + \alpha\, \frac{g_t}{\lVert g_t \rVert_2} \Big), \qquad
        g_t = \nabla_\delta\, \mathcal L(x + \delta_t)

    :math:`\Pi_\epsilon` scales :math:`\delta` down to the norm :math:`\epsilon`. Norms are per sequence, without
    padding, which gets no :math:`\delta`. The values of :math:`\delta_0` are uniform in
    :math:`\pm s / \sqrt{T C}` for a sequence of T tokens with C features. All passes draw the same dropout and
    masks, as in the authors' code. A step costs K forward and K backward passes and, for the gradients of
    :math:`\delta`, K - 1 more backward passes without gradients of weights. Two passes from ``start=0``, with a step as
    long as the radius, are FGM: the loss on the plain embeddings and on the worst nearby, half of its paper's loss.

    Args:
        steps: number of forward passes, at least 2 (K in the paper).
        step_size: norm of a step of :math:`\delta` (alpha).
        radius: largest norm of :math:`\delta` (epsilon).
        start: size of :math:`\delta_0`, at most about its norm (s); 0 begins at the plain embeddings.

    Raises:
        InputError: as :class:`R3FLoss`, or if the loss does not depend on the embeddings.

    Reference:
        FreeLB (Zhu et al., ICLR 2020, arXiv 1909.11764), Algorithm 1. FGM: Miyato et al. (ICLR 2017, arXiv 1605.07725),
        who also normalize the embeddings.

    Example:
        >>> fgm = FreeLBLoss(steps=2, step_size=0.2, radius=0.2, start=0)  # used as RDropLoss
        >>> fgm.passes
        2
    """

    title = "FreeLB"

    def __init__(
        self, steps: int = 3, step_size: NotNegative = 0.1, radius: NotNegative = 0.4, start: NotNegative = 0.1
    ) -> None:
        self.steps = whole_number("steps", steps, least=2)
        self.step_size = not_negative("step_size", step_size)
        self.radius = not_negative("radius", radius)
        self.start = not_negative("start", start)
        super().__init__()

    @override
    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        seed = int(new_seed())
        state: list[tuple[Tensor, Tensor, int]] = []  # delta in this pass, and its tokens

        def delta_of(embedded: Tensor, real: Tensor, dim: int) -> Tensor:
            if not state:
                state.append((self._initial(embedded, real, dim, seed).requires_grad_(), real, dim))
            return state[0][0].to(embedded.dtype)

        losses = []
        for step in range(self.steps):
            is_last = step == self.steps - 1
            repetition = nullcontext() if is_last else draws_repeated(forward.model)
            with repetition, self.noised(forward.model, batch, delta_of):
                losses.append(forward(batch)[0])
            if not is_last:
                state[0] = self._ascended(losses[-1], *state[0]).requires_grad_(), *state[0][1:]
        return torch.stack(losses).mean()

    def _initial(self, embedded: Tensor, real: Tensor, dim: int, seed: int) -> Tensor:
        dtype = torch.promote_types(embedded.dtype, torch.float32)
        if not self.start:
            return torch.zeros_like(embedded, dtype=dtype)
        values = real.sum(dim, keepdim=True).clamp(min=1) * embedded.shape[-1]
        # From a seed, because the passes must not draw from torch's generator.
        uniform = functional.seeded_uniform(seed, embedded.shape, device=embedded.device).to(dtype)
        return (self.start * (2 * uniform - 1) / values.sqrt()).masked_fill(~real, 0.0)

    def _ascended(self, loss: Tensor, delta: Tensor, real: Tensor, dim: int) -> Tensor:
        """Return delta moved up the gradient of the loss, per sequence, and back into the ball."""
        try:
            (gradient,) = torch.autograd.grad(LOSS_SCALE * loss, delta, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise InputError("FreeLB needs gradient checkpointing with `use_reentrant=False`.") from error
        if gradient is None:
            raise InputError("FreeLB needs a loss that depends on the token embeddings: they may be detached in it.")
        gradient = gradient.masked_fill(~real, 0.0)
        norm = torch.linalg.vector_norm(gradient, dim=(dim, 2), keepdim=True)
        # `where`, because zero times an infinite gradient is NaN.
        moved = torch.where(norm.isfinite() & (norm > 0), gradient / norm, 0.0) * self.step_size + delta.detach()
        norm = torch.linalg.vector_norm(moved, dim=(dim, 2), keepdim=True)
        return torch.where(norm > self.radius, moved * (self.radius / norm), moved)
