"""Attribution of a model's predictions to its attention weights; captum computes the gradients."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from typing_extensions import override

from attnreg import functional
from attnreg.errors import InputError
from attnreg.functional.region import Region
from attnreg.injection import undisturbed
from attnreg.injection.backends import Tap
from attnreg.injection.discovery.snapshot import draws_repeated
from attnreg.injection.handle import AttachHandle
from attnreg.outputs import (
    IGNORED,
    a_batch,
    after_virtual,
    is_multi_label,
    labels_of,
    moved_labels,
    needed_labels_of,
    predictions_of,
    shifts_labels,
)
from attnreg.sites import SiteInfo

_AS_FUNCTION = "pass `target` as a function of the output and the batch that returns the score to explain."


class Target:
    r"""The score s to explain, chosen by the shape of the logits.

    * classification and multiple choice, ``(B, C)``: :math:`\sum_b z_{b, c_b}`, the logit of each sample's class;
    * tokens, ``(B, N, C)``: :math:`\sum_{b,n} \log \mathrm{softmax}(z_{bn})_{c_{bn}}` over labelled positions;
    * extractive question answering: as for tokens, with two classes per row, where the answer begins and ends;
    * regression, ``(B,)`` or ``(B, 1)``, or float labels in the logits' shape: :math:`-\sum (z - y)^2`; but
      labels of at least 0 that sum to 1 are soft labels of classes, and the class with the highest is the gold class.

    The classes c are the predicted classes (pseudo-labels), fixed by the plain forward pass, or the gold labels. If the
    model shifts its labels one position to the left, as causal language models do, so does the target. The value of
    the model's loss tells whether it does; if this is unclear, the model's class.

    Args:
        kind: ``"predicted"``, ``"label"``, or a function of the model's output and the batch that returns the scores of
            samples, ``(B,)``, or the score of the batch.

    Reference:
        AD-DROP (NeurIPS 2022), Section 2, and its official code.
    """

    def __init__(self, kind: str | Callable[[Any, Mapping[str, Any]], Tensor] = "predicted") -> None:
        if kind not in ("predicted", "label") and not callable(kind):
            raise InputError(f"Expected `target` to be 'predicted', 'label' or a function, got {kind!r}.")
        self.kind = kind
        self._model: Any = None

    def for_model(self, model: nn.Module) -> Target:
        """Adapt the target to a model; a model with several labels per row needs a function as ``kind``."""
        if callable(self.kind):
            return self
        if is_multi_label(model):
            raise InputError(
                f"A multi-label classifier has no single class to explain, as `target` {self.kind!r} needs: pass a "
                "function that scores the labels to explain, or, if each row has one, set `config.problem_type`."
            )
        target = Target(self.kind)
        target._model = model
        return target

    def _labels(self, output: Any, batch: Mapping[str, Any]) -> Any:
        labels: Any = labels_of(batch, logits_of(output))
        if not isinstance(labels, Tensor) or batch.get("labels") is None:
            return labels
        moved = _shifts_labels(self._model, output, batch)
        labels = after_virtual(self._model, labels, logits_of(output))
        return moved_labels(labels) if moved else labels

    def classes(self, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the classes whose score is explained; ``None`` for regression and for a function."""
        if callable(self.kind):
            return None
        logits, labels = logits_of(output), self._labels(output, batch)
        one_number = logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1)
        numbers = isinstance(labels, Tensor) and labels.is_floating_point() and labels.shape == logits.shape
        if numbers and not one_number and (labels >= 0).all() and ((labels.sum(-1) - 1).abs() < 1e-3).all():  # soft
            numbers, labels = False, labels.argmax(-1)
        if one_number or numbers:  # regression
            return None
        if gold := self.kind == "label":
            needed_labels_of(batch, logits)  # raises if there are none
        if isinstance(labels, Tensor) and (gold or logits.dim() == 2) and labels.numel() != logits[..., 0].numel():
            shapes = f"Labels {tuple(labels.shape)} are no classes of logits {tuple(logits.shape)}"
            raise InputError(f"{shapes}: {_AS_FUNCTION}")
        if gold:
            return labels
        classes = logits.detach().argmax(-1)
        if logits.dim() == 3:
            masks = {n: after_virtual(self._model, x, logits, 0) for n, x in batch.items() if "attention_mask" in n}
            ignored = _unlabelled(logits, {**batch, **masks, "labels": labels})
            classes = classes if ignored is None else classes.masked_fill(ignored, IGNORED)
        return classes

    def score(self, output: Any, batch: Mapping[str, Any], classes: Tensor | None) -> Tensor:
        """Compute the score of the batch, shape ``(1,)``, from the result of :meth:`classes`."""
        if callable(self.kind):
            score = self.kind(output, batch)
            if not isinstance(score, Tensor):
                raise InputError(f"Expected `target` to return a tensor, the score to explain, got {score!r}.")
            return score.sum().reshape(1)
        logits = logits_of(output)
        if classes is None:
            labels = needed_labels_of(batch, logits)
            return -F.mse_loss(logits.reshape(-1), labels.reshape(-1).to(logits.dtype), reduction="sum").reshape(1)
        if logits.dim() == 2:
            classes = classes.reshape(-1, 1)
            return logits.gather(-1, classes.clamp(min=0)).masked_fill(classes == IGNORED, 0.0).sum().reshape(1)
        flat = logits.flatten(0, -2), classes.reshape(-1)
        return -F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum").reshape(1)


def logits_of(output: Any) -> Tensor:
    """Return the result of :func:`attnreg.outputs.predictions_of`, or raise if it has no known shape."""
    logits = predictions_of(output)
    if not isinstance(logits, Tensor) or logits.dim() not in (1, 2, 3):
        shape = f" with logits of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
        text = f"The model's output, {type(output).__name__}{shape}, has no `logits` of shape (B,), (B, C) or (B, N, C)"
        raise InputError(f"{text}: {_AS_FUNCTION}")
    return logits


_SHIFTS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # what losses have shown, which takes time and memory


def _shifts_labels(model: nn.Module | None, output: Any, batch: Mapping[str, Any]) -> bool:
    """Whether a model's loss compares labels with the logits one position before them, by its loss or by its class."""
    shifts = None if model is None else _SHIFTS.get(model)
    if shifts is None and (shifts := _by_loss(output, batch)) is not None and model is not None:
        _SHIFTS[model] = shifts
    return shifts_labels(model) if shifts is None and model is not None else bool(shifts)


def _by_loss(output: Any, batch: Mapping[str, Any]) -> bool | None:
    """Whether labels are shifted in the loss of an output; ``None`` if unclear."""
    loss, logits, labels = getattr(output, "loss", None), logits_of(output), batch["labels"]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or logits.dim() != 3 or labels.shape != logits.shape[:2]:
        return None
    value, flat, distances = float(loss.detach()), logits.detach().flatten(0, 1).float(), []
    items = batch.get("num_items_in_batch")
    for targets in (labels, moved_labels(labels)):
        count = (targets != IGNORED).sum() if items is None else items
        total = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        distances.append(abs(value - float(total) / max(float(count), 1.0)))
    plain, shifted = distances
    if plain == shifted or min(plain, shifted) > 1e-3 * abs(value) + 1e-4:
        return None
    return shifted < plain


def _unlabelled(logits: Tensor, batch: Mapping[str, Any]) -> Tensor | None:
    """Find the positions without a label or, in a batch without labels, the padding."""
    decodes = any(name.startswith("decoder_input") for name in batch)  # so `attention_mask` is the encoder's
    for name in ("labels", "decoder_attention_mask", *([] if decodes else ["attention_mask"])):
        tensor = batch.get(name)
        if isinstance(tensor, Tensor) and tensor.shape == logits.shape[:2]:
            return tensor == (IGNORED if name == "labels" else 0)
    return None


class FactoredGradient(NamedTuple):
    r"""The gradient with respect to attention weights as the product :math:`(\partial s / \partial O) V^\top`."""

    output_gradient: Tensor  # (B, H, Q, D)
    values: Tensor  # (B, H_kv, K, D)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, H, Q, K)``."""
        return *self.output_gradient.shape[:-1], self.values.shape[-2]


class Attributions(UserDict[str, Tensor]):
    """Attributions ``(B, H, Q, K)`` by label; a factored gradient is multiplied out on each access."""

    data: dict[str, Any]  # tensors and factored gradients

    @override
    def __getitem__(self, label: str) -> Tensor:
        attribution = self.data[label]
        return functional.weights_gradient(*attribution) if isinstance(attribution, FactoredGradient) else attribution

    @override
    def __repr__(self) -> str:
        return f"Attributions({self.shapes})"  # without computing them

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """``(B, H, Q, K)`` of every attribution, without computing it."""
        return {label: tuple(attribution.shape) for label, attribution in self.data.items()}

    def region(self, label: str, valid: Tensor | None, p: float, region: Region) -> Tensor:
        """Return the candidate region of an attribution; see :func:`attnreg.functional.candidate_region`."""
        attribution = self.data[label]
        if isinstance(attribution, FactoredGradient):
            return functional.factored_region(*attribution, valid, p, region)
        return functional.candidate_region(attribution, valid, p, region)


ByLabel = Mapping[str, Tensor | FactoredGradient]


@dataclass(frozen=True)
class _Pass:
    """The first of the two passes, by the arguments of :func:`explain`."""

    model: nn.Module
    batch: Mapping[str, Any]
    handle: AttachHandle
    labels: Sequence[str]
    target: Target
    steps: int

    def output(self) -> Any:
        # In training mode, all passes have the same dropout, and skip the same layers.
        with draws_repeated(self.model) if self.model.training else nullcontext():
            return self.model(**a_batch(self.model, self.batch))


def explain(
    model: nn.Module,
    batch: Mapping[str, Any],
    handle: AttachHandle,
    labels: Sequence[str],
    *,
    method: str = "gradient",
    target: Target | None = None,
    steps: int = 20,
    training: bool = False,
    dtype: torch.dtype | None = None,
) -> Attributions:
    """Attribute a model's score on a batch to the attention weights A of some of its sites.

    The model runs uncompiled and without the masks of attached regularizers. Afterwards, even after an exception, its
    mode, its parameters' ``requires_grad`` and ``grad``, its hooks and the random state are as before.

    ``handle`` attaches a regularizer to the model, ``labels`` name sites of the handle, and ``method`` is a key of
    :data:`METHODS`. ``training`` runs the model in training mode, with dropout, and ``dtype`` under autocast to it.

    Returns:
        attributions ``(B, H, Q, K)``, by label; under a fused kernel, ``"gradient"`` computes them on access.
    """
    for site in handle.sites:
        if site.label in labels and isinstance(site, SiteInfo) and site.in_parts:
            raise InputError(f"{site.name} computes its attention in parts (per image or window), so it has no one A.")
    model = extract_model_from_parallel(model)
    target = (target or Target()).for_model(model)
    run = _Pass(model, batch, handle, labels, target, steps)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model, training=training))
        if training:
            torch.manual_seed(int(torch.randint(2**31, ())))  # not the dropout of the training step
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            stack.callback(parameter.requires_grad_)
            parameter.requires_grad_(False)  # gradients of weights take time and memory
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dtype is not None:
            stack.enter_context(torch.autocast(next(model.parameters()).device.type, dtype))
        try:
            attributions = METHODS[method](run)
            target.for_model(model)  # raises: transformers may set the kind of labels in its first pass
        except RuntimeError as error:
            # Torch's messages about a gradient with respect to a tensor on which the score does not depend.
            if not any(part in str(error) for part in ("not have been used in the graph", "does not require grad")):
                raise
            raise InputError(
                f"The score to explain does not depend on every attributed site ({', '.join(labels)}): attach only to "
                "modules that lead to it (`modules=...`), pass another `target`, or checkpoint with "
                "`use_reentrant=False`."
            ) from error
    detached: dict[str, Any] = {label: x.detach() if isinstance(x, Tensor) else x for label, x in attributions.items()}
    return Attributions(detached)


def gradient(run: _Pass) -> ByLabel:
    r"""GA: the signed gradient of s with respect to A, for all layers in one backward pass.

    Under a fused kernel, A is never computed: :math:`\partial s / \partial A = (\partial s / \partial O) V^\top`.
    """
    taps = {label: Tap(at_output=True) for label in run.labels}
    gradients = _gradients(run, taps, times_tapped=False)
    return {label: x if (v := taps[label].values) is None else FactoredGradient(x, v) for label, x in gradients.items()}


def gradient_times_attention(run: _Pass) -> ByLabel:
    r""":math:`A \odot \partial s / \partial A`; its sum over a head is the derivative of s by a gate on that head.

    At a site of hidden states h, :math:`h \odot \partial s / \partial h`.
    """
    return _gradients(run, {label: Tap() for label in run.labels}, times_tapped=True)


def integrated_gradients(run: _Pass) -> ByLabel:
    r"""IGA: :math:`A \odot \frac{1}{m} \sum_{k=1}^m \partial s(\frac{k}{m} A) / \partial A`, one layer at a time.

    The attributions of a layer sum to s(A) - s(0), up to the discretisation error. Captum's
    ``LayerIntegratedGradients`` does not fit: its baseline is A of other inputs, never 0.
    """
    from captum.attr import IntegratedGradients

    weights, output = _weights(run)
    classes = run.target.classes(output, run.batch)
    attributions = {}
    for label, a in weights.items():
        tap = Tap()

        def score(replacement: Tensor, tap: Tap = tap) -> Tensor:
            tap.replacement = replacement
            return run.target.score(run.output(), run.batch, classes)

        with run.handle.tapped({label: tap}):  # backward passes too, since gradient checkpointing recomputes in them
            attributions[label] = IntegratedGradients(score).attribute(
                a,
                baselines=0.0,
                n_steps=run.steps,
                method="riemann_right",
                internal_batch_size=len(a),  # one step per forward pass
            )
    return attributions


def attention(run: _Pass) -> ByLabel:
    """AA: the attention weights themselves."""
    return _weights(run)[0]


METHODS: dict[str, Callable[[_Pass], ByLabel]] = {
    "gradient": gradient,
    "gradient_times_attention": gradient_times_attention,
    "integrated_gradients": integrated_gradients,
    "attention": attention,
}


def _gradients(run: _Pass, taps: Mapping[str, Tap], *, times_tapped: bool) -> dict[str, Tensor]:
    """Return the gradients with respect to the tensors in the taps, perhaps times these tensors."""
    from captum.attr import LayerGradientXActivation

    ran, skipped = set[str](), set[str]()

    def score(unused: Tensor) -> Tensor:
        output = run.output()
        explained = run.target.score(output, run.batch, run.target.classes(output, run.batch))
        skipped.update(taps.keys() - ran)  # layers that the model skipped; captum needs a pass through every tap
        for label in skipped:
            explained = explained + 0 * taps[label](explained.new_zeros(1)).sum()
        return explained

    for label, tap in taps.items():
        tap.register_forward_pre_hook(lambda tap, args, label=label: ran.add(label))
    with run.handle.tapped(taps):
        captum = LayerGradientXActivation(score, list(taps.values()), multiply_by_inputs=times_tapped)
        gradients = captum.attribute(torch.zeros(1))
    return {label: gradient for label, gradient in zip(taps, gradients, strict=True) if label not in skipped}


def _weights(run: _Pass) -> tuple[dict[str, Tensor], Any]:
    """Return the attention weights of the sites and the model's output."""
    weights: dict[str, Tensor] = {}
    taps = {label: Tap() for label in run.labels}
    for label, tap in taps.items():
        tap.register_forward_hook(lambda tap, args, out, label=label: weights.update({label: out}))
    with torch.no_grad(), run.handle.tapped(taps):
        output = run.output()
    return weights, output
