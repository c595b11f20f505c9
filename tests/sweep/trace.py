"""Everything that a model is, to be compared with what it was."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

import attnreg
from tests.sweep.checks import attached, kept, run

OURS = ("forward", "_attnreg")


def fingerprint(value, depth=4):
    """Something that is equal if the value is."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return str(value.layout)
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else value.new_empty(0)
        return tuple(value.shape), str(value.dtype), hashlib.sha256(content.numpy().tobytes()).hexdigest()
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    if depth == 0 or callable(value):
        return id(value)
    if isinstance(value, Mapping):
        return [(repr(key), fingerprint(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [fingerprint(each, depth - 1) for each in value]
    return [(key, fingerprint(each, depth - 1)) for key, each in getattr(value, "__dict__", {}).items()]


def state(model, *, besides=()):
    """Every attribute of every module."""
    return {
        f"{name}.{attribute}": fingerprint(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in besides and "attnreg" not in getattr(getattr(value, "func", None), "__module__", "")
    }


def differences(before, after):
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def no_trace(model, inputs, options):
    """Attaching changes nothing but what it must; detaching changes that back; in eval mode the model is the plain one.

    The model has run before, so that what its own first pass leaves (caches) is there already.
    """
    fired = []
    hooks = [module.register_forward_hook(lambda *args: fired.append(1)) for module in model.modules()]
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            plain = run(model, inputs)
        fired.clear()
        before = state(model, besides=OURS)
        keys = list(model.state_dict())
        random = torch.random.get_rng_state()
        with attached(model, kept, options):
            assert not fired, "the user's hooks fired"
            assert torch.equal(random, torch.random.get_rng_state()), "random numbers were drawn"
            assert list(model.state_dict()) == keys
            changed = [
                key for key in differences(before, state(model, besides=OURS)) if "_forward_pre_hooks" not in key
            ]
            assert not changed, f"attaching changed {changed[:3]}"
            if not training:
                with torch.no_grad():
                    out = run(model, inputs)
                assert all(torch.equal(a, b) for a, b in zip(out, plain, strict=True)), "eval is not the plain model"
        with torch.no_grad():
            out = run(model, inputs)
        assert all(torch.equal(a, b) for a, b in zip(out, plain, strict=True)), "detached is not the plain model"
        assert not attnreg.is_attached(model)
        assert not any("_attnreg" in vars(module) for module in model.modules())
    for hook in hooks:
        hook.remove()
