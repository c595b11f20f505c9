"""Attached attention modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from attnreg.errors import NoAttentionError
from attnreg.injection.backends import BACKENDS, Backend
from attnreg.injection.backends.layout import Layout
from attnreg.injection.discovery import Discovery, ModelSite
from attnreg.injection.running.attached_attention import AttentionMode, Planned
from attnreg.injection.running.passes import Passes
from attnreg.injection.running.replaced_forward import ReplacedForward
from attnreg.sharding import is_sharded


class AttachedModule(ReplacedForward[tuple[tuple[Planned, ...], set[int]]]):
    """Runs an attention module's forward under an :class:`AttentionMode` while the provider may act.

    A record has the plan of a call, and the indices of the chosen sites in it.
    """

    def __init__(
        self, passes: Passes, module: nn.Module, plans: Sequence[tuple[Planned, ...] | None], name: str
    ) -> None:
        chosen = [{i for i, planned in enumerate(plan or ()) if planned.info} for plan in plans]
        records = [None if plan is None else (plan, sites) for plan, sites in zip(plans, chosen, strict=True)]
        super().__init__(passes, module, records, name)
        stacks = {tuple(planned.info and planned.info.stack for planned in plan or ()) for plan in plans}
        self.calls_differ = len(stacks) > 1
        used = {planned.backend for plan in plans if plan is not None for planned in plan}
        self._folds_heads = any("f" in planned.layout.dims for plan in plans for planned in plan or ())
        self._patched = [name for name in sorted(used) if type(BACKENDS[name]).patched is not Backend.patched]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with the provider's masks if they apply to this call."""
        passes, (plan, chosen) = self.passes, self.next() or ((), set())
        mode = None
        if plan and ((passes.taps and self._is_tapped(plan)) or passes.acts_at(self.name, self.module)):
            if not passes.latest.whole:
                passes.check_entry(self.name)
            if self._folds_heads and is_sharded(self.module):
                raise NoAttentionError(
                    f"{self.name} is split over several processes, and its samples and heads share a dimension, so it "
                    "would get the masks of other heads. Tensor parallelism is not supported."
                )
            mode = AttentionMode(passes, plan, self.name)
        outer, passes.mode = passes.mode, mode
        try:
            if mode is None:
                return self.plain(*args, **kwargs)
            output = mode.run(self._under_patches if self._patched else self.plain, *args, **kwargs)
        finally:
            passes.mode = outer
        if mode.seen != chosen or (mode.index < len(plan) and mode.lacks_alike()):
            raise NoAttentionError(
                f"{self.name} computes less attention in this forward pass than when it was attached. If it skips "
                f"some, leave it out with `modules=...`; otherwise, some is hidden: {passes.why_hidden}"
            )
        return output

    def _is_tapped(self, plan: Sequence[Planned]) -> bool:
        return any(planned.info and planned.info.label in self.passes.taps for planned in plan)

    def _under_patches(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise NoAttentionError(
                f"{self.name} computes its attention with {', '.join(self._patched)}, which cannot be masked in a "
                "compiled model. Do not compile the model (the kernel itself is compiled), or load it with "
                "attn_implementation='sdpa'."
            )
        with ExitStack() as stack:
            for backend in self._patched:
                stack.enter_context(BACKENDS[backend].patched())
            return self.plain(*args, **kwargs)


def attached_modules(
    passes: Passes, discovery: Discovery, chosen: Sequence[ModelSite]
) -> dict[nn.Module, AttachedModule]:
    """Return the attached modules of chosen attention, which expect in their calls the attention of the dry run."""
    sites = {part: site for site in chosen for part in (site.attention, *site.others)}
    later_parts = {part for site in discovery.sites if site.parts != "blocks" for part in site.others}
    modules = dict.fromkeys(attention.caller.module for attention in sites)  # in running order
    plans: dict[nn.Module, dict[int, list[Planned]]] = {module: defaultdict(list) for module in modules}
    for attention in discovery.attentions:
        if attention in later_parts:
            continue
        call = next((call for call in reversed(attention.running) if call.module in modules), None)
        if call is not None:
            layout = Layout() if attention.structure is None else attention.structure.layout
            site = sites.get(attention)
            info, parts = (None, None) if site is None else (site.info, site.parts)
            plans[call.module][call.index].append(Planned(attention.backend, attention.rank, info, layout, parts))
    attached = {}
    for module, calls in plans.items():
        plans_of_module = [tuple(calls.get(index, ())) for index in range(max(calls) + 1)]
        records = [plan if any(planned.info for planned in plan) else None for plan in plans_of_module]
        attached[module] = AttachedModule(passes, module, records, discovery.names[module])
    return attached
