"""One mask for all log-probabilities that the loss of a TRL trainer compares."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from attnreg.draws import new_seed
from attnreg.errors import InputError
from attnreg.injection import AttachHandle, evaluated

SEED, ROWS = "attnreg_seed", "attnreg_rows"  # names of a generation batch's seed and of its samples' indices
Method = Callable[..., Any]


class OneMask:
    """Gives every sample one mask in all passes of a trainer's policy whose log-probabilities its loss compares.

    Completions are generated, and the reference model runs, in eval mode. It replaces methods of the trainer, because
    no callback of a Trainer runs between these passes.
    """

    def __init__(self, trainer: Any, handle: AttachHandle) -> None:
        classes = {cls.__name__ for cls in type(trainer).__mro__}
        methods: dict[str, Method] = {}
        if "DPOTrainer" in classes:
            methods = {"_compute_loss": self._loss_of_pairs}
        elif classes & {"GRPOTrainer", "RLOOTrainer"}:
            methods = {
                "_generate_single_turn": self._generate,
                "_generate_and_score_completions": self._score,
                "_get_per_token_logps_and_entropies": self._log_probs,
                "_compute_loss": self._loss,
            }
        if not methods or not all(hasattr(trainer, name) for name in methods):
            name = type(trainer).__name__
            raise InputError(f"`one_mask=True` is for DPOTrainer, GRPOTrainer and RLOOTrainer of TRL 1.16, got {name}.")
        if not handle.seeds_own:
            raise InputError('`one_mask=True` needs `attach(..., own_dropout="seeded")` or `attnreg.seeded(model)`.')
        if getattr(trainer, "precompute_ref_logps", False) and trainer.model.training:
            raise InputError(
                "The log-probabilities of the reference were computed in training mode, with dropout: call "
                "`model.eval()` before you create the trainer."
            )
        if getattr(trainer, "padding_free", False):
            raise InputError("`one_mask=True` needs one row per answer: set `padding_free=False`.")
        with handle.replay(0, [0]):  # raises if the regularizer cannot tell samples apart
            pass
        self.trainer, self.handle, self.seed = trainer, handle, 0
        if trainer.ref_model is not None:
            trainer.ref_model.eval()
        _is_reference(trainer.model)  # raises if PEFT cannot tell
        for name, method in methods.items():
            setattr(trainer, name, functools.partial(method, getattr(trainer, name)))

    def _with_masks(self, model: nn.Module, seed: int, rows: Iterable[int]) -> Method:
        """Return a function that runs a model on the next samples, whose indices are ``rows``, under their masks."""
        remaining = iter(rows)

        def run(**inputs: Any) -> Any:
            with self.handle.replay(seed, [*itertools.islice(remaining, len(inputs["input_ids"]))]):
                return model(**inputs)

        return run

    def _loss_of_pairs(self, original: Method, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Any:
        if not self.trainer.model.training:
            return original(model, inputs, *args)
        pairs = range(len(inputs["input_ids"]) // 2)
        with _evaluated_without_gradients(self.trainer.model):
            return original(self._with_masks(model, int(new_seed()), [*pairs, *pairs]), inputs, *args)

    def _generate(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        with evaluated(self.trainer.model):
            return original(*args, **kwargs)

    def _score(self, original: Method, inputs: Any) -> dict[str, Any]:
        self.seed = int(new_seed())
        output: dict[str, Any] = original(inputs)
        if self.trainer.model.training:  # the trainer shuffles and splits this batch
            output |= {SEED: torch.tensor(self.seed), ROWS: torch.arange(len(output["completion_ids"]))}
        return output

    def _log_probs(self, original: Method, model: Any, *args: Any, **kwargs: Any) -> Any:
        policy = self.trainer.model
        if torch.is_grad_enabled() or not policy.training or model is not policy:
            return original(model, *args, **kwargs)
        if not _is_reference(policy):
            return original(self._with_masks(model, self.seed, itertools.count()), *args, **kwargs)
        with evaluated(policy):
            return original(model, *args, **kwargs)

    def _loss(self, original: Method, model: nn.Module, inputs: dict[str, Any]) -> Any:
        if SEED not in inputs:  # in evaluation
            return original(model, inputs)
        return original(self._with_masks(model, int(inputs[SEED]), inputs[ROWS].tolist()), inputs)


def _is_reference(model: Any) -> bool:
    """Return whether a model is the reference now: its adapters are off, or TRL's adapter ``ref`` is on."""
    status = model.get_model_status() if hasattr(model, "get_model_status") else None
    return status is not None and (not status.enabled or status.active_adapters == ["ref"])


@contextmanager
def _evaluated_without_gradients(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode within the block whenever gradients are off, as in a pass of the reference."""
    with ExitStack() as evaluation, ExitStack() as hooks:

        def enter(*_: Any) -> None:
            if not torch.is_grad_enabled():
                evaluation.enter_context(evaluated(model))

        hooks.callback(model.register_forward_pre_hook(enter).remove)
        hooks.callback(model.register_forward_hook(lambda *_: evaluation.close(), always_call=True).remove)
        yield
