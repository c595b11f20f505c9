"""FreeLB and FGM: adversarial training on token embeddings."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from attnreg import functional
from attnreg.arguments import NotNegative, not_negative, whole_number
from attnreg.draws import new_seed
from attnreg.errors import InputError
from attnreg.training.embeddings import EmbeddingObjective, Tokens
from attnreg.training.method import Batch, draws_repeated
from attnreg.training.objective import ForwardPass

_LOSS_SCALE = 1024.0  # keeps float16 gradients from vanishing; a direction does not depend on it


class FreeLBLoss(EmbeddingObjective):
    r"""The mean loss of several forward passes, on token embeddings that move up the gradient of the loss.

    .. math:: \mathcal L = \frac1K \sum_{t=0}^{K-1} \mathcal L(x + \delta_t), \qquad
        \delta_{t+1} = \Pi_\epsilon \Big( \delta_t + \alpha\, \frac{g_t}{\lVert g_t \rVert_2} \Big), \qquad
        g_t = \nabla_\delta\, \mathcal L(x + \delta_t)

    :math:`\Pi_\epsilon` scales :math:`\delta` down to the norm :math:`\epsilon`. Norms are those of a whole sequence,
    without padding, which gets no :math:`\delta`. The values of :math:`\delta_0` are uniform in
    :math:`\pm s / \sqrt{T C}` for a sequence of T tokens with C features each. All passes draw the same dropout and
    masks, as in the authors' code. A step costs K forward and K backward passes and, for the gradients of
    :math:`\delta`, K - 1 more backward passes without gradients of weights.

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
        >>> import attnreg
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> method = attnreg.training.FineTuning(model, optimizer, objective=FreeLBLoss.fgm(eps=0.2))
        >>> method.step({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1])}).loss.shape
        torch.Size([])
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

    @classmethod
    def fgm(cls, eps: NotNegative) -> FreeLBLoss:
        """Return the objective of FGM: the mean loss on the plain embeddings and, one step away, on the worst nearby.

        It is half of the paper's loss, so that one learning rate suits training with and without it.
        """
        return cls(steps=2, step_size=eps, radius=eps, start=0.0)

    @override
    def __call__(self, forward: ForwardPass, batch: Batch) -> Tensor:
        self.check_tokens(batch)
        seed = int(new_seed())
        now: list[tuple[Tensor, Tokens]] = []  # delta in this pass

        def delta_of(embedded: Tensor, tokens: Tokens) -> Tensor:
            if not now:
                now.append((self._first(embedded, tokens, seed).requires_grad_(), tokens))
            return now[0][0].to(embedded.dtype)

        losses = []
        for step in range(self.steps):
            is_last = step == self.steps - 1
            repeated = nullcontext() if is_last else draws_repeated(forward.model)
            with repeated, self.noised(forward.model, batch, delta_of):
                losses.append(forward(batch)[0])
            if not is_last:
                delta, tokens = now[0]
                now[0] = self._moved(losses[-1], delta, tokens).requires_grad_(), tokens
        return torch.stack(losses).mean()

    def _first(self, embedded: Tensor, tokens: Tokens, seed: int) -> Tensor:
        dtype = torch.promote_types(embedded.dtype, torch.float32)
        if not self.start:
            return torch.zeros_like(embedded, dtype=dtype)
        values = tokens.real.sum(tokens.dim, keepdim=True).clamp(min=1) * embedded.shape[-1]
        # Of a seed, because the passes repeat what they draw.
        uniform = functional.seeded_uniform(seed, embedded.shape, device=embedded.device).to(dtype)
        return (self.start * (2 * uniform - 1) / values.sqrt()).masked_fill(~tokens.real, 0.0)

    def _moved(self, loss: Tensor, delta: Tensor, tokens: Tokens) -> Tensor:
        """Move up the gradient of the loss, by sequence, and back into the ball."""
        try:
            (gradient,) = torch.autograd.grad(_LOSS_SCALE * loss, delta, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise InputError("FreeLB needs gradient checkpointing with `use_reentrant=False`.") from error
        if gradient is None:
            raise InputError("FreeLB needs a loss that depends on the token embeddings: they may be detached in it.")
        gradient, dims = gradient.masked_fill(~tokens.real, 0.0), (tokens.dim, 2)
        norm = torch.linalg.vector_norm(gradient, dim=dims, keepdim=True)
        # `where`, because zero times an infinite gradient is no number.
        moved = torch.where(norm.isfinite() & (norm > 0), gradient / norm, 0.0) * self.step_size + delta.detach()
        norm = torch.linalg.vector_norm(moved, dim=dims, keepdim=True)
        return torch.where(norm > self.radius, moved * (self.radius / norm), moved)
