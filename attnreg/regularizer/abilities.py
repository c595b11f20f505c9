"""Questions to a composition about the abilities of the regularizers in it; see :class:`attnreg.Regularizer`."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from attnreg.errors import AsleepWarning, InputError
from attnreg.regularizer.base import Regularizer

PATIENCE = 100  # training passes without a step; gradient accumulation rarely spans more


def that_look_at_batches(regularizer: Regularizer) -> list[Regularizer]:
    """Return the regularizers in a composition that look at batches, or raise if one must be alone but is not."""
    looking = [each for each in regularizer.parts() if each.looks_at_batches]
    alone = next((each for each in looking if each.looks_alone), None)
    others = [type(each).__name__ for each in looking if each is not alone]
    if alone is not None and others:
        remove = f"remove {', '.join(others)} from the composition"
        raise InputError(f"{type(alone).__name__} must be the only provider that looks at batches: {remove}.")
    return looking


def effects(regularizer: Regularizer) -> list[str]:
    """Return a sentence for each regularizer in a composition that drops nothing by design."""
    others = (each for each in regularizer.parts() if each.effect != "drops")
    return [f"{type(each).__name__} {each.effect}; it drops nothing by design." for each in others]


def asleep_for(regularizer: Regularizer, epochs: int) -> str | None:
    """Return a sentence on a regularizer, or one inside it, that does not act within this number of epochs, if any."""
    late = next((each for each in regularizer.parts() if each.first_epoch >= epochs), None)
    if late is None:
        return None
    return (
        f"{type(late).__name__} first acts in epoch {late.first_epoch + 1}, but training ends after epoch {epochs}: "
        "train for longer, or lower `offset`."
    )


def never_stepped(regularizer: Regularizer, steps: Tensor, passes: int) -> str | None:
    """Return a sentence on a schedule that nobody advances, if so; for :meth:`attnreg.Regularizer.why_asleep`."""
    if passes < PATIENCE or int(steps):
        return None
    return (
        f"The schedule of {type(regularizer).__name__} has not moved in {passes} training passes: call `handle.step()` "
        "after each optimizer step (training methods and AttnRegCallback do)."
    )


def never_added(regularizer: Regularizer, passes: int) -> str | None:
    """Return a sentence on a penalty that nobody has asked for in so many training passes, if there is one."""
    parts = regularizer.parts()
    priced = next((part for part in parts if type(part).penalty is not Regularizer.penalty), None)
    if passes < PATIENCE or priced is None or any(part._gave_penalty for part in parts):
        return None
    return (
        f"Nobody has added the penalty of {type(priced).__name__} to the loss in {passes} training passes: add "
        "`provider.penalty()` where it is not None (training methods and RegularizedTrainer do)."
    )


class Watch:
    """Counts training passes, and warns once of a schedule, epoch, parameter or penalty that has no effect."""

    def __init__(self, regularizer: Regularizer) -> None:
        self.regularizer = regularizer
        self.passes = 0
        self._first: list[tuple[Tensor, Tensor]] = []  # learned parameters, with a copy from the first training pass
        self._done = False

    def training_pass(self) -> None:
        """Count a training pass, and warn if the regularizer cannot act."""
        if torch.compiler.is_compiling() or self._done:
            return
        self.passes += 1
        reasons = [reason for each in self.regularizer.parts() if (reason := each.why_asleep(self.passes))]
        if self.passes == 1:  # fused optimizers do not count the versions of what they change
            learned = self.regularizer.learned_parameters()
            self._first = [(p, p.detach().clone()) for p in learned if p.requires_grad]
        if (
            self._first
            and self.passes >= PATIENCE
            and all(
                p.grad is not None and p.device == before.device and torch.equal(p, before) for p, before in self._first
            )
        ):
            reasons.append(
                f"The learned parameters of {type(self.regularizer).__name__} have gradients, but have not changed in "
                f"{self.passes} training passes. Add them to the optimizer: "
                '`optimizer.add_param_group({"params": provider.learned_parameters()})`.'
            )
        if reason := never_added(self.regularizer, self.passes):
            reasons.append(reason)
        self._done = bool(reasons) or self.passes > PATIENCE
        self._first = [] if self._done else self._first
        for reason in reasons:
            warnings.warn(reason, AsleepWarning, stacklevel=2)
