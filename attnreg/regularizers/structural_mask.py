"""Attention restricted to a structure: a window, a parse or a program's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from attnreg import AttentionSite, Mask, MaskProvider, SiteInfo, functional
from attnreg.arguments import true_or_false, whole_number
from attnreg.errors import InputError
from attnreg.functional.seeded import on_device
from attnreg.sites import check_shared_keys


class StructuralMask(MaskProvider):
    r"""Keep only the positions that a graph connects.

    .. math:: \tilde S_{bhqk} = -\infty \text{ if } G_{bqk} = 0 \text{ and } h \in \text{heads}

    The mask is not random. Like every regularizer, it acts in training mode only; to keep the structure at evaluation,
    pass the graph to the model as its attention mask.

    Args:
        graph: a distance d, for :math:`G_{qk} = [\,|q - k| \le d\,]`, or a function that takes the model's inputs by
            name, at the start of a forward pass, and returns G, bool, ``(B, N, N)`` or ``(N, N)``, ``True`` = kept.
            ``save_pretrained`` cannot save a function.
        heads: indices of the heads to restrict, from 0 (default: all heads).
        keep_first: connect the first position of a sequence, such as ``[CLS]``, with all others.

    Raises:
        InputError: when attached, if queries and keys come from different sequences; in a forward pass, if the graph
            has another shape.

    Reference:
        SG-Net (AAAI 2020, arXiv 1908.05147); Structure-induced Transformer (ACL Findings 2021, arXiv 2012.14710); for
        some heads of some layers, Code Structure Guided Transformer (arXiv 2104.09340).

    Example:
        >>> StructuralMask(1)(AttentionSite(shape=(2, 4, 3, 3))).scores.int()[0, 0]
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """

    def __init__(
        self,
        graph: int | Callable[[Mapping[str, Any]], Tensor],
        heads: Sequence[int] | None = None,
        keep_first: bool = False,
    ) -> None:
        super().__init__()
        self.graph = graph if callable(graph) else whole_number("graph", graph, least=0)
        if heads is not None and (not isinstance(heads, Sequence) or isinstance(heads, str) or not heads):
            raise InputError(f"Expected `heads` to be a list with at least one index, got {heads!r}.")
        self.heads = None if heads is None else [whole_number("heads", head, least=0) for head in heads]
        self.keep_first = true_or_false("keep_first", keep_first)
        self._graph: Tensor | None = None

    @override
    def check(self, sites: Sequence[SiteInfo], model: nn.Module) -> None:
        if cross := [site.name for site in sites if site.stack == "cross"]:
            raise InputError(f"StructuralMask needs self-attention, got cross-attention at {cross[0]}: set `stacks`.")
        for site in sites:
            self._check_heads(site)
        check_shared_keys("StructuralMask compares positions of one sequence", sites)

    def _check_heads(self, site: SiteInfo) -> None:
        if site.heads is not None and (missing := [head for head in self.heads or () if head >= site.heads]):
            raise InputError(f"Expected `heads` of {site.name} to be below {site.heads}, got {missing}.")

    @property
    @override
    def draws_in_prepare(self) -> bool:
        return callable(self.graph)

    @override
    def prepare(self, inputs: Mapping[str, Any]) -> None:
        if isinstance(self.graph, int):
            return
        self._graph = self.graph(inputs)
        if self._graph.dtype != torch.bool or self._graph.dim() not in (2, 3):
            answer = f"{self._graph.dtype} of shape {tuple(self._graph.shape)}"
            raise InputError(f"Expected `graph` to return a bool tensor of shape (B, N, N) or (N, N), got {answer}.")

    @override
    def forward(self, site: AttentionSite) -> Mask | None:
        keep = self._graph_at(site)
        if self.keep_first:
            first = functional.sequence_starts(site.valid, site.shape).to(site.device)[:, None]
            keep = keep | first.unsqueeze(-1) | first.unsqueeze(-2)
        if self.heads is not None:
            self._check_heads(site)
            unrestricted = on_device([head not in self.heads for head in range(site.shape[1])], site.device)
            keep = keep | unrestricted.view(1, -1, 1, 1)
        return Mask(scores=keep)

    def _graph_at(self, site: AttentionSite) -> Tensor:
        """Return the graph at a site, ``(B, 1, N, N)`` or ``(1, 1, N, N)``."""
        batch, _, queries, keys = site.shape
        if queries != keys:
            raise InputError(
                f"StructuralMask compares positions of one sequence, but {site.name} has {queries} queries and {keys} "
                "keys: choose other attention with `modules=...`."
            )
        if isinstance(self.graph, int):
            positions = torch.arange(keys, device=site.device)
            return ((positions[:, None] - positions).abs() <= self.graph)[None, None]
        if self._graph is None:
            raise RuntimeError("This forward pass has no graph: call the attached model, not a part of it.")
        graph = self._graph if self._graph.dim() == 3 else self._graph[None]
        if graph.shape[1:] != (queries, keys) or graph.shape[0] not in (1, batch):
            raise InputError(
                f"Expected a graph of shape (B, N, N) = {(batch, queries, keys)}, got {tuple(graph.shape)} at "
                f"{site.name}: if the model's stacks have different lengths, attach to one stack (`stacks`)."
            )
        return graph.to(site.device).unsqueeze(1)
