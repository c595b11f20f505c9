"""Watch a forward pass for attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from attnreg.functional.validity import allowed
from attnreg.injection.backends import BACKENDS, BY_FUNCTION, Call, Noting
from attnreg.injection.discovery import rules
from attnreg.injection.discovery.blocks import LISTS, ModuleCall
from attnreg.injection.discovery.origins import FIRST, compact
from attnreg.injection.discovery.structure import Structure, structure_of
from attnreg.injection.discovery.tracing import Tracer

LOGSUMEXP = torch.logsumexp, Tensor.logsumexp


@dataclass(eq=False)
class AttentionCall:
    """A softmax or fused kernel call in the dry run."""

    backend: str  # name of the backend that saw it
    shape: tuple[int, ...]  # shape of its scores
    running: tuple[ModuleCall, ...]  # the module calls around it, innermost last
    structure: Structure | None  # the kind of attention; ``None`` if its scores are not products of queries and keys
    causal: bool = False  # whether no query may attend to a later key
    head_size: int | None = None  # D, if the backend sees queries
    weighted: bool = False  # whether its weights were multiplied by values
    queries_and_keys: tuple[Tensor, Tensor] | None = None  # if the backend sees them
    # bool, ``(B, K)``, the keys to which any query may attend, if queries share their keys
    tokens: Tensor | None = None

    @property
    def rank(self) -> int:
        """The number of dimensions of its scores."""
        return len(self.shape)

    @property
    def heads(self) -> int | None:
        """The number of heads H; ``None`` if the structure is ``None``."""
        return None if self.structure is None else self.structure.layout.sizes(self.shape)[1]

    @property
    def is_attention(self) -> bool:
        """Whether it is attention that can be masked."""
        return self.structure is not None and self.weighted and self.structure.same_order

    @property
    def caller(self) -> ModuleCall:
        """The call of the module whose forward computes the attention."""
        depth = len(self.running) - 1
        while depth and isinstance(self.running[depth].module, BACKENDS[self.backend].modules):
            depth -= 1
        return self.running[depth]


class Finder(Noting):
    """Watches a forward pass, and notes every attention and the modules that compute it.

    ``tensors`` are those that the model holds besides its parameters and buffers.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[Tensor], inputs: Any) -> None:
        super().__init__()
        self.model = model
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self.samples = next((leaf.shape[0] for leaf in leaves if leaf.dim()), 0)
        self._tracer = Tracer([*model.parameters(), *model.buffers(), *tensors], leaves, self._confirm)
        self.names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self.attentions: list[AttentionCall] = []
        # the module calls around products of values with weights that are not from a softmax, and around logsumexps
        self.other_weights: list[tuple[ModuleCall, ...]] = []
        self.logsumexps: list[tuple[ModuleCall, ...]] = []
        self.entries: list[ModuleCall] = []  # calls of entries of lists
        self.linear: list[tuple[ModuleCall, Tensor]] = []  # linear layers of one vector per sample, with their output
        self._listed = {child for module in self.names if isinstance(module, LISTS) for child in module.children()}
        self._latest_read: tuple[Any, Tensor, Structure | None] | None = None
        self._running: list[ModuleCall] = []
        self._latest: dict[nn.Module, ModuleCall] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch forward passes of the model within the block."""
        with ExitStack() as stack:
            for module in self.names:
                if not isinstance(module, torch.jit.ScriptModule):
                    forward = functools.partial(self._forward, module, module.forward)
                    replaced = functools.wraps(module.forward)(forward)
                    stack.enter_context(mock.patch.object(module, "forward", replaced))
            for backend in BACKENDS.values():
                stack.enter_context(backend.patched())
            stack.enter_context(self._tracer)
            stack.enter_context(self)
            yield

    @property
    def called(self) -> Set[nn.Module]:
        """The modules that ran, in the order of their first calls."""
        return self._latest.keys()

    def classifier(self, output: Any) -> ModuleCall | None:
        """Return the last call of a linear layer on one vector per sample whose output is in the model's output."""
        returned = {leaf.untyped_storage()._cdata for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
        calls = [call for call, logits in self.linear if logits.untyped_storage()._cdata in returned]
        return calls[-1] if calls else None

    def _forward(self, module: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
        earlier = self._latest.get(module)
        call = self._latest[module] = ModuleCall(module, args, kwargs, 0 if earlier is None else earlier.index + 1)
        if earlier is not None:
            call.is_repeated = earlier.is_repeated = True
        if module in self._listed:
            call.is_entry, call.around = True, tuple(self._running)
            self.entries.append(call)
        self._running.append(call)
        try:
            output = plain(*args, **kwargs)
        finally:
            self._running.pop()
        call.end(output)
        call.is_block = call.is_block and self._returns_states_first(call, output)
        if isinstance(module, nn.Linear) and isinstance(output, Tensor) and output.dim() == 2:
            call.around, call.rows, call.input_name = tuple(self._running), len(output), "input"
            self.linear.append((call, output))
        return output

    def _returns_states_first(self, call: ModuleCall, output: Any) -> bool:
        """Whether no other entry of a block's output comes from its first argument more clearly than the first entry.

        Blocks of Flux get the states of images and texts, and return those of texts and images.
        """
        entries = output if isinstance(output, (tuple, list)) else ()
        alike = [entry for entry in entries if isinstance(entry, Tensor) and entry.shape == call.shape]
        with self._tracer.paused():
            states, *origins = map(self._tracer.origins.read, (call.states, *alike))
            if states is None or len(origins) < 2:
                return True
            equal = [0 if origin is None else int((origin[FIRST] == states[FIRST]).sum()) for origin in origins]
        return equal[0] == max(equal)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        backend = BY_FUNCTION.get(func) if self._running else None
        if func in LOGSUMEXP and self._running:
            origin = self._tracer.origins.read(args[0])
            if origin is not None and rules.is_pair(origin):
                self.logsumexps.append(tuple(self._running))
        if backend is None:
            return func(*args, **(kwargs or {}))
        return backend.discover(self, func, *args, **(kwargs or {}))

    @override
    def note(self, backend: str, call: Call, func: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = self._tracer
        with tracer.paused():
            origin = self._origin_of_scores(call)
            structure = self._read(origin, call)
        attention = AttentionCall(backend, call.shape, tuple(self._running), structure)
        self.attentions.append(attention)
        if call.query is None:
            out = func(*args, **kwargs)
            if structure is not None:
                tracer.came_from_softmax(out, len(self.attentions) - 1, structure.key_part, call.shape[call.dim])
        else:
            with tracer.paused():
                out = func(*args, **kwargs)
                assert origin is not None
                tracer.came_from_queries(out[0] if isinstance(out, tuple) else out, origin)
            self._confirm(len(self.attentions) - 1)
            attention.head_size = call.query.shape[-1]
            attention.queries_and_keys = None if call.key is None else (call.query, call.key)
        if structure is not None:
            with tracer.paused():
                self._describe(attention, structure, call)
        return out

    def _read(self, origin: Tensor | None, call: Call) -> Structure | None:
        """Derive the structure of a call. The latest result is reused, because most layers equal the one before."""
        key = call.shape, call.dim, call.query is None, self.heads
        entries, latest = None if origin is None else compact(origin), self._latest_read
        if entries is not None and latest is not None and latest[0] == key and entries.equal(latest[1]):
            return latest[2]
        structure = structure_of(origin, call, self._tracer.origins, self.heads)
        self._latest_read = None if entries is None else (key, entries, structure)
        return structure

    def _origin_of_scores(self, call: Call) -> Tensor | None:
        if call.query is None or call.key is None:
            return None if call.scores is None else self._tracer.origins.read(call.scores)
        query, key = self._tracer.origins.read(call.query), self._tracer.origins.read(call.key)
        if key is not None:
            groups = call.shape[-3] // call.key.shape[-3] if call.key.dim() > 2 else 1
            if call.key.dim() > 2 and 1 < call.key.shape[-3] != call.shape[-3]:
                key = key.repeat_interleave(groups, -3)
            key = key.transpose(-1, -2)
        return rules.scores(query, key, call.shape)

    def _describe(self, attention: AttentionCall, structure: Structure, call: Call) -> None:
        layout = structure.layout
        batch, _, queries, keys = layout.sizes(call.shape)
        valid = None if call.valid is None else layout.canonical_mask(call.valid, call.shape)
        if call.scores is not None:
            valid = allowed(layout.canonical(call.scores))
        if not layout.has_queries:
            return
        if valid is None:
            attention.tokens = torch.ones(batch, layout.number_of_keys(keys), dtype=torch.bool)
            return
        valid = valid.expand(*valid.shape[:-2], valid.shape[-2], keys)
        if layout.has_sinks and not bool((valid.any(-2) & ~layout.are_keys(keys, valid.device)).any()):
            # Columns that the model forbids to all queries are padding, so their number varies with the length.
            layout = replace(layout, sinks_before=0, sinks_after=0)
            attention.structure = replace(structure, layout=layout)
        valid = valid[..., layout.sinks_before : keys - layout.sinks_after]
        four_dims = valid.reshape(*[1] * (4 - valid.dim()), *valid.shape)
        attention.tokens = four_dims.any(2).any(1).expand(batch, -1)
        is_square = valid.shape[-2] == queries == valid.shape[-1] > 1
        attention.causal = is_square and not bool(valid.triu(1).any()) and bool(valid.tril(-1).any())

    def _confirm(self, number: int | None) -> None:
        """Note that the weights of an attention (``None``: other weights) are multiplied by values."""
        if number is None:
            if self._running:
                self.other_weights.append(tuple(self._running))
            return
        attention = self.attentions[number]
        if not attention.weighted and attention.structure is not None and attention.structure.relation == "self":
            for call in attention.running:
                call.attention_count += 1
        attention.weighted = True
