"""Checks of what happens after attaching: other entries, repetitions, copies, other lengths.

Where the plain model itself does not do the same twice (its parts pass on a state, or do not run alone), a check passes.
"""

import copy
import functools
import re
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.sweep.checks import TOLERANCE, apart, attached, dropped_key, floats, has_other_ways, keep_all, tokens_of
from tests.sweep.inputs import parameters

METHODS = re.compile(r"get_\w+_features|encode\w*|decode\w*")


def _dropping(model, options):
    return attached(model, attnreg.AttentionDropout(0.5, placement="scores"), options)


def _copied(value):
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def _run(call, *args, **kwargs):
    torch.manual_seed(0)
    return floats(call(*_copied(args), **_copied(kwargs)))


def _plain(call, *args, **kwargs):
    """What the plain model computes, if it does so at all, and the same again."""
    try:
        first, again = _run(call, *args, **kwargs), _run(call, *args, **kwargs)
    except Exception:
        return None
    return first if first and apart(first, again) == 0.0 else None


def _same(out, expected, what):
    difference = apart([x.detach() for x in out], [x.detach() for x in expected])
    assert difference < TOLERANCE, f"{what} differs by {difference:.1e}"


def _raised_in(error, package):
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and f"/{package}/" in frame.tb_frame.f_code.co_filename


def _says(error):
    """Whether this library refuses what it is asked in a sentence."""
    return _raised_in(error, "attnreg") and re.match(r"[A-Z].{40,}\.$", str(error), re.DOTALL) is not None


def entries(model, inputs, options):
    """A pass is repeated under its seed, as a whole and in each part; a method begins a pass that can be repeated."""
    model.train()
    plain = _plain(model, **inputs)
    with _dropping(model, options) as (handle, _):
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
            seeds = set()
            hooks = [module.register_forward_hook(lambda *_, seen=seeds: seen.add(handle.seed)) for module in modules]
            out = _run(getattr(model, name), **arguments)
            for hook in hooks:
                hook.remove()
            if apart([x.detach() for x in out], alone) == 0.0:
                continue  # it reaches no attention that is masked
            if len(seeds) > 1:
                continue  # it makes several passes, such as one for each image
            assert handle.seed is not None, f"{name} is masked, but has no seed"
            with handle.replay():
                _same(_run(getattr(model, name), **arguments), out, f"a replay of {name}")


def _noted(model, modules, inputs):
    """What the model computes, and the arguments and outputs of modules that are called once."""
    given = {module: [] for module in modules}

    def note_arguments(module, args, kwargs):
        given[module].append([_copied(args), _copied(kwargs)])

    def note_output(module, args, out):
        given[module][-1].append(_copied(floats(out)))

    hooks = [module.register_forward_pre_hook(note_arguments, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(note_output) for module in modules]
    out = _run(model, **inputs)
    for hook in hooks:
        hook.remove()
    return out, {module: tuple(calls[0]) for module, calls in given.items() if len(calls) == 1}


def _around(model, handle):
    """The modules around the first and the last site, and their own; not the model."""
    names = [site.name.split(":")[0] for site in (handle.sites[0], handle.sites[-1])]
    paths = dict.fromkeys(".".join(name.split(".")[: n + 1]) for name in names for n in range(name.count(".") + 1))
    known = dict(model.named_modules())
    lists = (nn.ModuleList, nn.ModuleDict)
    return [known[path] for path in paths if path in known and not isinstance(known[path], lists)]


def _methods(model, inputs):
    """The public methods that may reach attention, with arguments of one forward pass."""
    for name in dir(type(model)):
        method = getattr(type(model), name, None)
        if METHODS.fullmatch(name) and callable(method):
            taken = dict(list(parameters(method).items())[1:])  # not the model itself
            if all(key in inputs for key, needed in taken.items() if needed):
                yield name, {key: inputs[key] for key in taken if key in inputs}


def copied_block(model, inputs, options):
    """A copy of a block is the plain block."""
    model.train()
    with _dropping(model, options) as (handle, _):
        for block in _blocks(model, handle)[:1]:
            copied = copy.deepcopy(block)
            assert not attnreg.is_attached(copied), "a copied block is attached"
            assert not any(isinstance(each, type(handle)) for each in vars(copied).values())
            assert "forward" not in vars(copied) or not _is_ours(vars(copied)["forward"]), "it calls the model's"


def _is_ours(forward):
    shadow = next(iter(getattr(forward, "args", ())), None)
    return getattr(shadow, "installed", None) is not None


def _blocks(model, handle):
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


def checkpointing(model, inputs, options):
    """Blocks that are computed again in the backward pass have the masks that they had, or it is refused."""
    model.train()
    with _dropping(model, options) as (handle, _):
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
        with _dropping(model, options) as (handle, _):
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


def _gradients(model, inputs):
    model.zero_grad()
    out = [x.nan_to_num().float().square().mean() for x in _run(model, **inputs) if x.requires_grad]
    if not out:
        return None
    torch.stack(out).sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _agree(a, b):
    if any((x is None) != (y is None) for x, y in zip(a, b, strict=True)):
        return False
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if y is not None and y.numel()]
    scale = max(float(y.abs().max()) for _, y in pairs)
    return all(float((x.nan_to_num() - y.nan_to_num()).abs().max()) <= 1e-4 * scale for x, y in pairs)


@contextmanager
def _checkpointed(blocks, *, use_reentrant):
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


def _checkpoint(forward, use_reentrant, *args, **kwargs):
    if not use_reentrant:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    def positional(*given):  # it cuts only these off from what was computed before
        return forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    return checkpoint(positional, *(_with_gradient(x) for x in (*args, *kwargs.values())), use_reentrant=True)


def _with_gradient(x):
    is_state = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and not x.requires_grad
    return x.clone().requires_grad_() if is_state else x


def other_lengths(model, inputs, options):
    """Inputs that are longer or shorter than when the model was attached are masked as those are."""
    ids, _ = tokens_of(inputs)
    if ids is None or ids.shape[1] < 4:
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


def _longer(x, length, change):
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != length:
        return x
    return torch.cat([x[:, :1], x], 1) if change > 0 else x[:, 1:]


AFTERWARDS = {"entries": entries, "copied block": copied_block, "checkpointing": checkpointing, "other lengths": other_lengths}  # fmt: skip
