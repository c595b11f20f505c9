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
    looking = [part for part in regularizer.parts() if part.looks_at_batches]
    exclusive = next((part for part in looking if part.looks_alone), None)
    surplus = ", ".join(type(part).__name__ for part in looking if part is not exclusive)
    if exclusive is not None and surplus:
        only = f"{type(exclusive).__name__} must be the only provider that looks at batches"
        raise InputError(f"{only}: remove {surplus} from the composition.")
    return looking


def effects(regularizer: Regularizer) -> list[str]:
    """Return a sentence per regularizer in a composition that drops nothing by design."""
    parts = (part for part in regularizer.parts() if part.effect != "drops")
    return [f"{type(part).__name__} {part.effect}; it drops nothing by design." for part in parts]


def asleep_for(regularizer: Regularizer, epochs: int) -> str | None:
    """Return a sentence on a part of a regularizer that does not act within this number of epochs, if there is one."""
    late = next((part for part in regularizer.parts() if part.first_epoch >= epochs), None)
    if late is None:
        return None
    return (
        f"{type(late).__name__} first acts in epoch {late.first_epoch + 1}, but training ends after epoch {epochs}: "
        "train for longer, or lower `offset`."
    )


def never_stepped(regularizer: Regularizer, steps: Tensor, passes: int) -> str | None:
    """Return a sentence on a schedule if nobody advances it; for :meth:`attnreg.Regularizer.why_asleep`."""
    if passes < PATIENCE or int(steps):
        return None
    return (
        f"The schedule of {type(regularizer).__name__} has not moved in {passes} training passes: call `handle.step()` "
        "after each optimizer step (training methods and AttnRegCallback do)."
    )


def never_added(regularizer: Regularizer, passes: int) -> str | None:
    """Return a sentence on a penalty that nobody has added to the loss in so many training passes, if there is one."""
    parts = regularizer.parts()
    penalized = next((part for part in parts if type(part).penalty is not Regularizer.penalty), None)
    if passes < PATIENCE or penalized is None or any(part._penalty_was_read for part in parts):
        return None
    return (
        f"Nobody has added the penalty of {type(penalized).__name__} to the loss in {passes} training passes: add "
        "`provider.penalty()` where it is not None (training methods and RegularizedTrainer do)."
    )


class Watch:
    """Counts training passes, and warns once of a schedule, epoch, parameter or penalty that has no effect."""

    def __init__(self, regularizer: Regularizer) -> None:
        self.regularizer = regularizer
        self.passes = 0
        self._initial: list[tuple[Tensor, Tensor]] = []  # learned parameters, with a copy from the first training pass
        self._done = False

    def training_pass(self) -> None:
        """Count a training pass, and warn if the regularizer cannot act."""
        if torch.compiler.is_compiling() or self._done:
            return
        self.passes += 1
        reasons = [reason for part in self.regularizer.parts() if (reason := part.why_asleep(self.passes))]
        if self.passes == 1:  # compared by value: fused optimizers do not count versions of tensors
            learned = self.regularizer.learned_parameters()
            self._initial = [(p, p.detach().clone()) for p in learned if p.requires_grad]
        unchanged = (
            p.grad is not None and p.device == copy.device and torch.equal(p, copy) for p, copy in self._initial
        )
        if self._initial and self.passes >= PATIENCE and all(unchanged):
            reasons.append(
                f"The learned parameters of {type(self.regularizer).__name__} have gradients, but have not changed in "
                f"{self.passes} training passes. Add them to the optimizer: "
                '`optimizer.add_param_group({"params": provider.learned_parameters()})`.'
            )
        if reason := never_added(self.regularizer, self.passes):
            reasons.append(reason)
        self._done = bool(reasons) or self.passes > PATIENCE
        self._initial = [] if self._done else self._initial
        for reason in reasons:
            warnings.warn(reason, AsleepWarning, stacklevel=2)
