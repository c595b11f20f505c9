"""Copy one learner's state to another."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from attnreg.training.fine_tuning import FineTuning


def copy_learner(source: FineTuning, target: FineTuning) -> None:
    """Copy weights, optimizer state and schedule in place, so that the two share no tensor and no memory is added."""
    with torch.no_grad():
        for theirs, ours in zip(source.model.state_dict().values(), target.model.state_dict().values(), strict=True):
            ours.copy_(theirs)
        for theirs, ours in zip(_parameters(source), _parameters(target), strict=True):
            for name, value in source.optimizer.state[theirs].items():
                held = target.optimizer.state[ours].get(name)
                if isinstance(value, Tensor) and isinstance(held, Tensor):
                    held.copy_(value)
                else:
                    target.optimizer.state[ours][name] = copy.deepcopy(value)
    for their_group, our_group in zip(source.optimizer.param_groups, target.optimizer.param_groups, strict=True):
        our_group.update({name: value for name, value in their_group.items() if name != "params"})
    if source.scheduler is not None and target.scheduler is not None:
        target.scheduler.load_state_dict(source.scheduler.state_dict())


def _parameters(learner: FineTuning) -> list[Tensor]:
    return [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
