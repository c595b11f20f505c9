"""Checks of what happens after attaching: other entries, repetitions, copies, other lengths.

Where the plain model itself does not do the same twice (its parts pass on a state, or do not run alone), a check passes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.sweep.checks import apart, dropped_key, has_other_ways, keep_all

METHODS = re.compile(r"get_\w+_features|encode\w*|decode\w*")
TOLERANCE = 2e-4


@contextmanager
def _attached(model: nn.Module, options: Mapping[str, Any]) -> Iterator[attnreg.injection.AttachHandle]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", attnreg.injection.CoverageWarning)
        handle = attnreg.attach(model, attnreg.AttentionDropout(0.5, placement="scores"), **options)
    with handle:
        yield handle


def _floats(out: Any) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]


def _copied(value: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def _run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return _floats(call(*_copied(args), **_copied(kwargs)))


def _plain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Tensor] | None:
    """What the plain model computes, if it does so at all, and the same again."""
    try:
        first, again = _run(call, *args, **kwargs), _run(call, *args, **kwargs)
    except Exception:
        return None
    return first if first and apart(first, again) == 0.0 else None


def _same(out: list[Tensor], expected: list[Tensor], what: str) -> None:
    difference = apart([x.detach() for x in out], [x.detach() for x in expected])
    assert difference < TOLERANCE, f"{what} differs by {difference:.1e}"


def _raised_in(error: Exception, package: str) -> bool:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and f"/{package}/" in frame.tb_frame.f_code.co_filename


def _says(error: Exception) -> bool:
    """Whether this library refuses what it is asked in a sentence."""
    return _raised_in(error, "attnreg") and re.match(r"[A-Z].{40,}\.$", str(error), re.DOTALL) is not None


def entries(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """A pass is repeated under its seed, as a whole and in each part; a method begins a pass that can be repeated."""
    model.train()
    plain = _plain(model, **inputs)
    with _attached(model, options) as handle:
        modules = _around(model, handle)
        out, calls = _noted(model, modules, inputs)
        seed = handle.seed
        assert seed is not None, "a masked pass has no seed"
        if plain is None:
            return
        assert any(handle.drop_rates().values()) or not apart(out, plain), "masked, but no rate says so"
        with handle.disabled():
            _, own = _noted(model, modules, inputs)
        with handle.replay(seed):
            _same(_run(model, **inputs), out, "a replay")
        for module, (args, kwargs, expected) in calls.items():
            with handle.disabled():
                alone = _plain(module, *own[module][0], **own[module][1])
                if alone is None or apart(alone, own[module][2]) > 0.0:
                    continue
            with handle.replay(seed):
                _same(_run(module, *args, **kwargs), expected, f"a replay of {type(module).__name__} alone")
        for name, arguments in _methods(model, inputs):
            with handle.disabled():
                alone = _plain(getattr(model, name), **arguments)
            if alone is None:
                continue
            out = _run(getattr(model, name), **arguments)
            if apart([x.detach() for x in out], alone) == 0.0:
                continue  # it reaches no attention that is masked
            assert handle.seed is not None, f"{name} is masked, but has no seed"
            with handle.replay():
                _same(_run(getattr(model, name), **arguments), out, f"a replay of {name}")


def _noted(
    model: nn.Module, modules: list[nn.Module], inputs: Mapping[str, Any]
) -> tuple[list[Tensor], dict[nn.Module, tuple[Any, Any, list[Tensor]]]]:
    """What the model computes, and the arguments and outputs of modules that are called once."""
    given: dict[nn.Module, list[Any]] = {module: [] for module in modules}
    hooks = []
    for module in modules:
        hooks += [
            module.register_forward_pre_hook(functools.partial(_note_arguments, given), with_kwargs=True),
            module.register_forward_hook(functools.partial(_note_output, given)),
        ]
    out = _run(model, **inputs)
    for hook in hooks:
        hook.remove()
    return out, {module: tuple(calls[0]) for module, calls in given.items() if len(calls) == 1}


def _note_arguments(given: dict[nn.Module, list[Any]], module: nn.Module, args: Any, kwargs: Any) -> None:
    given[module].append([_copied(args), _copied(kwargs)])


def _note_output(given: dict[nn.Module, list[Any]], module: nn.Module, args: Any, out: Any) -> None:
    given[module][-1].append(_copied(_floats(out)))


def _around(model: nn.Module, handle: attnreg.injection.AttachHandle) -> list[nn.Module]:
    """The modules around the first and the last site, and their own; not the model."""
    names = [site.name.split(":")[0] for site in (handle.sites[0], handle.sites[-1])]
    paths = dict.fromkeys(".".join(name.split(".")[: n + 1]) for name in names for n in range(name.count(".") + 1))
    known = dict(model.named_modules())
    lists = (nn.ModuleList, nn.ModuleDict)
    return [known[path] for path in paths if path in known and not isinstance(known[path], lists)]


def _methods(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The public methods that may reach attention, with arguments of one forward pass."""
    for name in dir(type(model)):
        method = getattr(type(model), name, None)
        if METHODS.fullmatch(name) and callable(method):
            parameters = dict(list(inspect.signature(method).parameters.items())[1:])
            if all(
                each.default is not each.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or key in inputs
                for key, each in parameters.items()
            ):
                yield name, {key: inputs[key] for key in parameters if key in inputs}


def copied_block(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """A copy of a block is the plain block."""
    model.train()
    with _attached(model, options) as handle:
        for block in _blocks(model, handle)[:1]:
            copied = copy.deepcopy(block)
            assert not attnreg.is_attached(copied), "a copied block is attached"
            assert not any(isinstance(each, type(handle)) for each in vars(copied).values())
            assert "forward" not in vars(copied) or not _is_ours(vars(copied)["forward"]), "it calls the model's"


def _is_ours(forward: Any) -> bool:
    shadow = next(iter(getattr(forward, "args", ())), None)
    return getattr(shadow, "installed", None) is not None


def _blocks(model: nn.Module, handle: attnreg.injection.AttachHandle) -> list[nn.Module]:
    """The modules in lists of blocks around each site, innermost lists only."""
    known, found = dict(model.named_modules()), {}
    for site in handle.sites:
        path = site.name.split(":")[0].split(".")
        for n in range(len(path), 0, -1):
            above = known.get(".".join(path[: n - 1]))
            if isinstance(above, (nn.ModuleList, nn.Sequential)) and ".".join(path[:n]) in known:
                found[known[".".join(path[:n])]] = None
                break
    return list(found)


def checkpointing(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Blocks that are computed again in the backward pass have the masks that they had, or it is refused."""
    model.train()
    with _attached(model, options) as handle:
        blocks = _blocks(model, handle)
    if not blocks:
        return
    for use_reentrant in (False, True):
        plain = _gradients(model, inputs)
        with _checkpointed(blocks, use_reentrant=use_reentrant):
            try:
                again = _gradients(model, inputs)
            except Exception:  # the plain model cannot be checkpointed so
                continue
        if plain is None or again is None or not _agree(plain, again):
            continue
        with _attached(model, options) as handle:
            expected = _gradients(model, inputs)
            with _checkpointed(blocks, use_reentrant=use_reentrant):
                try:
                    found = _gradients(model, inputs)
                except Exception as error:
                    if not _says(error):
                        raise
                    continue
            assert expected is not None
            assert found is not None
            assert handle.drop_rates(), "no rates"
            assert _agree(found, expected), f"gradients under checkpointing ({use_reentrant=}) are others"


def _gradients(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor | None] | None:
    model.zero_grad()
    out = [x.nan_to_num().float().square().mean() for x in _run(model, **inputs) if x.requires_grad]
    if not out:
        return None
    torch.stack(out).sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _agree(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None or y is not None]
    if any(x is None or y is None for x, y in pairs):
        return False
    scale = max(float(y.abs().max()) for _, y in pairs if y is not None and y.numel())
    return all(
        float((x.nan_to_num() - y.nan_to_num()).abs().max()) <= 1e-4 * scale
        for x, y in pairs
        if x is not None and y is not None and x.numel()
    )


@contextmanager
def _checkpointed(blocks: list[nn.Module], *, use_reentrant: bool) -> Iterator[None]:
    before = [(block, "forward" in vars(block), block.forward) for block in blocks]
    try:
        for block, _, forward in before:
            block.forward = functools.partial(_checkpoint, forward, use_reentrant)
        yield
    finally:
        for block, was_there, forward in before:
            if was_there:
                block.forward = forward
            else:
                del block.forward


def _checkpoint(forward: Callable[..., Any], use_reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    if not use_reentrant:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    def positional(*given: Any) -> Any:  # it cuts only these off from what was computed before
        return forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    return checkpoint(positional, *(_with_gradient(x) for x in (*args, *kwargs.values())), use_reentrant=True)


def _with_gradient(x: Any) -> Any:
    is_state = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and not x.requires_grad
    return x.clone().requires_grad_() if is_state else x


def other_lengths(model: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Inputs that are longer or shorter than when the model was attached are masked as those are."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 4:
        return
    length = ids.shape[1]
    options = {"example_inputs": inputs, **options}
    for change in (1, -1):
        other = {name: _longer(x, length, change) for name, x in inputs.items()}
        if _plain(model.train(), **other) is None:
            continue
        try:
            keep_all(model, other, options)
            if not has_other_ways(model, other, options):
                dropped_key(model, other, options)
        except Exception as error:
            if not (_says(error) or _raised_in(error, "transformers")):  # other tokens may stand for pieces of images
                raise


def _longer(x: Any, length: int, change: int) -> Any:
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != length:
        return x
    return torch.cat([x[:, :1], x], 1) if change > 0 else x[:, 1:]


AFTERWARDS = {"entries": entries, "copied block": copied_block, "checkpointing": checkpointing, "other lengths": other_lengths}  # fmt: skip
