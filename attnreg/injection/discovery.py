"""Finding where a model computes attention, by running it once on a tiny input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnreg.injection.backends import multihead, sdpa, softmax
from attnreg.injection.blocks import Block, Call, block_of
from attnreg.injection.errors import HIDDEN_KERNELS, NoAttentionError
from attnreg.injection.example_inputs import example_inputs as make_example_inputs
from attnreg.injection.layout import split_attention_mask
from attnreg.injection.undisturbed import undisturbed
from attnreg.masks import SiteInfo, Stack


@dataclass(frozen=True)
class FoundSite:
    """An attention site of a model: the module whose own forward computes it, and at which of the module's calls."""

    info: SiteInfo
    module: nn.Module
    call: int
    flat: bool = False  # its scores have three dimensions, (B * H, Q, K)
    heads: int = 1
    head_size: int | None = None  # of its queries; None where only scores can be seen
    block: Block | None = None  # the Transformer block that holds it, if it is a self-attention in one


def discover(
    model: nn.Module, example_inputs: Mapping[str, Any] | Sequence[Any] | None = None
) -> tuple[FoundSite, ...]:
    """Find the attention sites of a model, in the order in which they run.

    The model runs once, in eval mode, without gradients, on a tiny input; its mode and the random state are restored.

    Args:
        model: any model.
        example_inputs: keyword arguments (or a tuple of positional ones) for one forward pass; made up for
            transformers models with token ids or images and for torch's own Transformer modules.

    Returns:
        the sites; a module that several layers share (as in ALBERT) appears once per call.

    Raises:
        NoAttentionError: if the model cannot be run, or no attention is seen.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16)
        >>> [site.info.name for site in discover(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))]
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    finder = _Finder(model)
    _run_once(model, finder, example_inputs)
    if not finder.found:
        raise NoAttentionError(f"Expected attention in {type(model).__name__}, saw none: {HIDDEN_KERNELS}")
    depth = Counter(found.info.stack for found in finder.found)
    blocks = [
        block_of(model, site.info.name.split("#")[0], calls)
        for site, calls in zip(finder.found, finder.around, strict=True)
    ]
    return tuple(
        replace(found, info=replace(found.info, num_layers=depth[found.info.stack]), block=block)
        for found, block in zip(finder.found, blocks, strict=True)
    )


def _run_once(model: nn.Module, finder: _Finder, inputs: Mapping[str, Any] | Sequence[Any] | None) -> None:
    runnable = model
    if inputs is None:
        # A head may want more than its backbone (an end-of-sentence token, several choices) and has no attention.
        base = getattr(model, "base_model", model)
        runnable = base if isinstance(base, nn.Module) else model
        inputs = make_example_inputs(runnable)
        if not inputs:
            raise NoAttentionError(
                f"Expected `example_inputs` for {type(model).__name__}, got none: what it takes is not "
                "known, so pass the keyword arguments of one forward pass, `attach(..., example_inputs={...})`."
            )
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    try:
        with undisturbed(model), finder.watching(), torch.no_grad():
            runnable(*args, **kwargs)
    except Exception as error:
        raise NoAttentionError(
            f"Expected {type(model).__name__} to run on example inputs, got {type(error).__name__} "
            f"({' '.join(str(error).split())}): pass inputs that fit, `attach(..., example_inputs={{...}})`."
        ) from error


class _Finder(TorchFunctionMode):
    """Watches a forward pass: knows which module's forward is running, and notes the attention computed in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.found: list[FoundSite] = []
        self.around: list[list[Call]] = []  # the calls that each was part of
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[Call] = []
        self._calls: Counter[nn.Module] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(Call(module, args, kwargs, self._calls[module]))
        self._calls[module] += 1

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._running.pop().returns(output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in sdpa.FUNCTIONS:
            self._note(*_sdpa_facts(*args, **kwargs))
        elif func in softmax.FUNCTIONS and softmax.is_attention(args, kwargs):
            self._note(*_softmax_facts(softmax.scores_of(args, kwargs)))
        elif func in multihead.FUNCTIONS:
            with self:
                return multihead.undispatched(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, shape: Sequence[int], causal: bool, head_size: int | None = None) -> None:
        depth = len(self._running) - 1
        while depth and isinstance(self._running[depth].module, nn.Softmax):
            depth -= 1
        running = self._running[: depth + 1]
        module, args, kwargs = running[-1].module, running[-1].args, running[-1].kwargs
        call = self._calls[module] - 1
        if any(found.module is module and found.call == call for found in self.found):
            return
        stack: Stack = "encoder"
        if _is_cross(module, args, kwargs) or shape[-2] != shape[-1]:
            stack = "cross"
        elif causal or any(isinstance(each.module, nn.TransformerDecoderLayer) for each in running):
            stack = "decoder"
        name = (self._names.get(module) or type(module).__name__) + (f"#{call + 1}" if call else "")
        layer = sum(found.info.stack == stack for found in self.found)
        # Where one dimension holds B * H, H is known only together with B.
        info = SiteInfo(name=name, layer=layer, stack=stack, heads=None if len(shape) == 3 else shape[-3])
        self.found.append(FoundSite(info, module, call, len(shape) == 3, shape[-3], head_size))
        self.around.append(running)
        if stack != "cross":
            for each in running:
                each.attentions += 1


def _is_cross(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        query, key = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key")))
        return query is not key
    return kwargs.get("key_value_states") is not None or kwargs.get("encoder_hidden_states") is not None


def _sdpa_facts(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **kwargs: Any
) -> tuple[Sequence[int], bool, int]:
    shape = (*query.shape[:-1], key.shape[-2])
    is_causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    valid, _ = split_attention_mask(attn_mask, is_causal, query, key)
    return shape, valid is not None and _is_causal(valid.expand(shape)), query.shape[-1]


def _softmax_facts(scores: Tensor) -> tuple[Sequence[int], bool]:
    return scores.shape, _is_causal(softmax.allowed(scores))


def _is_causal(valid: Tensor) -> bool:
    return valid.shape[-2] == valid.shape[-1] > 1 and not bool(valid.triu(1).any())
