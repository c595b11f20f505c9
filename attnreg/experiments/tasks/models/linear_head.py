"""A linear probe: fit the linear head of a classifier or regressor on frozen features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.injection.discovery.snapshot import evaluated
from attnreg.outputs import needed_labels_of, predictions_of
from attnreg.training.method import Batch

FOLDS = 5
STRENGTHS = [10.0**power for power in range(-4, 5)]


@torch.no_grad()
def fit_linear_head(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Fit the last linear layer of a classifier by logistic regression on its inputs; of a regressor, by ridge.

    The rest of the model stays unchanged, and runs in eval mode. The strength of the L2 penalty is chosen by
    cross-validation in five parts, or as many as a class has rows, among nine powers of ten from 1e-4 to 1e4. The only
    row of a class is never held out.

    Args:
        model: a model with one label per row, whose last layer is linear.
        batches: labelled batches, all on the model's device.

    Returns:
        the chosen penalty: C, its inverse, for logistic regression; alpha for ridge regression.

    Raises:
        InputError: if the model's logits are not those of a linear layer that reads one state per row, there is not one
            label per row, or fewer than two classes have two rows.

    Reference:
        Kumar et al., Fine-Tuning can Distort Pretrained Features (ICLR 2022, arXiv 2202.10054): the probe before
        fine-tuning in LP-FT.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config)
        >>> batch = {"input_ids": torch.tensor([[1, 2], [1, 3], [4, 5], [4, 6]]), "labels": torch.tensor([0, 0, 1, 1])}
        >>> strength = fit_linear_head(model, [batch])
        >>> model.eval()(batch["input_ids"]).logits.argmax(1)
        tensor([0, 0, 1, 1])
    """
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.metrics import log_loss, make_scorer
    from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold

    if not batches:
        raise InputError("A linear probe needs batches to fit, got none.")
    head, features, labels = head_and_features(model, batches)
    if labels.dim() != 1 or len(labels) != len(features) or len(labels) < 2:
        raise InputError(
            f"A linear probe needs two rows or more with one label per row, got labels of shape {tuple(labels.shape)}."
        )
    x, y = features.double().cpu().numpy(), labels.cpu().numpy()
    if labels.is_floating_point():
        estimator: Any = Ridge(fit_intercept=head.bias is not None)
        name, score, parts = "alpha", "neg_mean_squared_error", [*KFold(min(FOLDS, len(y))).split(x)]
    else:
        classes, numbers, counts = np.unique(y, return_inverse=True, return_counts=True)
        needed = 2 if head.bias is not None else head.out_features  # a bias rules out a class without rows
        several, single = np.flatnonzero(counts[numbers] > 1), np.flatnonzero(counts[numbers] == 1)
        if len(classes) < needed or (counts > 1).sum() < 2:
            got = f"{counts.tolist()} rows"
            raise InputError(f"A linear probe needs {needed} classes, and two rows of two of them, got {got}.")
        estimator = LogisticRegression(max_iter=10_000, tol=1e-8, fit_intercept=head.bias is not None)
        score = make_scorer(log_loss, greater_is_better=False, response_method="predict_proba", labels=classes)
        divided = StratifiedKFold(min(FOLDS, int(counts[counts > 1].min()))).split(several, y[several])
        name, parts = "C", [(np.append(several[fit], single), several[held]) for fit, held in divided]
    search = GridSearchCV(estimator, {name: STRENGTHS}, scoring=score, cv=parts).fit(x, y)
    best = search.best_estimator_
    put_into_head(head, best.coef_, best.intercept_, None if labels.is_floating_point() else best.classes_)
    return float(search.best_params_[name])


@torch.no_grad()
def put_into_head(head: nn.Linear, weight: Any, bias: Any, classes: Any = None) -> None:
    """Set the weights of a linear head to those of an estimator of scikit-learn.

    ``classes`` are those of the estimator, which have rows; the bias rules out other classes. A regressor has ``None``.
    """
    weight = torch.as_tensor(weight).reshape(-1, head.in_features)
    bias = torch.as_tensor(bias).reshape(-1)
    if classes is not None:
        if len(weight) == 1:  # of two classes, the difference
            weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
        present = torch.as_tensor(classes)
        weight = weight.new_zeros(head.weight.shape).index_copy(0, present, weight)
        bias = (bias.min() - 100.0).repeat(head.out_features).index_copy(0, present, bias)
    head.weight.copy_(weight)
    if head.bias is not None:
        head.bias.copy_(bias)


def of_rows(tensor: Tensor, outputs: Tensor, logits: Tensor) -> Tensor:
    """Return a row of ``tensor`` per sample: at the token of which the outputs of a head are the logits of the model.

    A decoder's head reads all tokens, and the model returns the logits of the last. After pooling, tokens are the same.
    (In bfloat16, another token of one row in some thousand has the same outputs.)
    """
    is_read = (outputs.to(logits) == logits[:, None]).all(-1)
    last = is_read.shape[1] - 1 - is_read.long().flip(1).argmax(1)
    return tensor[torch.arange(len(tensor), device=tensor.device), last]


@torch.no_grad()
def head_and_features(model: nn.Module, batches: Iterable[Batch]) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return the head, its input states per row in eval mode, and the labels."""
    no_head = InputError(
        f"{type(model).__name__} has no linear head that reads one state per row, which probes and `attnreg fit` need. "
        "In a recipe, choose the state that it reads (`--pooling mean`), or fine-tune the whole model."
    )
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []
    features, labels = [], []
    with evaluated(model), ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                hook = layer.register_forward_hook(lambda module, args, output: calls.append((module, args[0], output)))
                hooks.enter_context(hook)
        for batch in batches:
            calls.clear()
            logits = predictions_of(model(**batch))
            if logits is None or not calls:
                raise no_head
            head, states, outputs = calls[-1]
            if states.dim() == 3 and outputs.shape[::2] == logits.shape:
                states, outputs = (of_rows(tensor, outputs, logits) for tensor in (states, outputs))
            if outputs.shape != logits.shape or not torch.allclose(outputs.to(logits), logits, atol=1e-7):
                raise no_head
            features.append(states)
            column = needed_labels_of(batch, logits)
            labels.append(column.squeeze(-1) if column.dim() == 2 and column.shape[1] == 1 else column)
    return head, torch.cat(features), torch.cat(labels)
