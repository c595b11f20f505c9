"""The training steps that steps.py times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import transformers as hf
from accelerate import Accelerator
from by_hand import OneBackwardPassPerLayer, P, training_step
from common import Shape

import attnreg
from attnreg.training import (
    SAM,
    AttackerDefender,
    ChildTuning,
    CrossEntropy,
    FineTuning,
    FreeLBLoss,
    LoRADropout,
    R3FLoss,
    RDropLoss,
    Reinforce,
    Rewards,
    Rounds,
    TrainingMethod,
    adamw,
)

T = 8
LEARNING_RATE = 5e-5
Arm = Callable[[Shape], tuple[Callable[[], object], int]]  # the call to time, and how many steps it makes
Make = Callable[[hf.PreTrainedModel], attnreg.Regularizer]


@dataclass(frozen=True)
class Row:
    """A row of the table: an arm, the arm that it is divided by, and the same step as users write it by hand."""

    arm: Arm
    base: Arm
    by_hand: dict[str, Arm] = field(default_factory=dict)


def fine_tuning(
    make: Make | None = None,
    attention: str = "sdpa",
    lora: bool | float = False,
    seeded: bool = False,
    compiled: bool = False,
    **config_options: Any,
) -> Arm:
    """Return an arm that fine-tunes, perhaps under a provider, or with LoRA, perhaps with LoRA Dropout at a rate."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(attention, **config_options), shape.batch()
        network = with_lora(model) if lora else model
        if seeded:
            attnreg.seeded(network)
        if isinstance(lora, float):
            LoRADropout(network, lora, lora)
        provider = None if make is None else make(model).to(shape.device)
        optimizer = adamw(network, LEARNING_RATE)
        if provider is not None and (learned := provider.learned_parameters()):
            optimizer.add_param_group({"params": learned})
        handle = None if provider is None else attnreg.attach(network, provider)
        runs = torch.compile(network) if compiled else network
        return _step(FineTuning(runs, optimizer, handle, accelerator=Accelerator()), batch)

    return arm


plain = fine_tuning()


def with_lora(model: hf.PreTrainedModel) -> torch.nn.Module:
    """Wrap a model in PEFT's LoRA of its queries and values."""
    from peft import LoraConfig, TaskType, get_peft_model

    return get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, target_modules=["query", "value"]))


def trained_by(method: Callable[..., TrainingMethod], **options: Any) -> Arm:
    """Return an arm with a training method and no provider."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        optimizer = adamw(model, LEARNING_RATE)
        return _step(method(model, optimizer, accelerator=Accelerator(), **options), batch)

    return arm


def plain_loop(shape: Shape) -> tuple[Callable[[], object], int]:
    """Return a training step in a loop of one's own."""
    model, batch = shape.model(), shape.batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        with Accelerator().autocast():
            training_step(model, optimizer, batch)

    return step, 1


def ad_drop(official: bool = False, first_pass_alone: bool = False, **options: Any) -> Arm:
    """Return an arm with AD-DROP in every step, or with its first pass alone."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model("eager" if official else "sdpa"), shape.batch()
        provider = (OneBackwardPassPerLayer if official else attnreg.AttributionProvider)(**options)
        method = FineTuning(model, adamw(model, LEARNING_RATE), provider, accelerator=Accelerator())
        if first_pass_alone:
            return lambda: provider.attribute(model.train(), batch), 1
        return _step(method, batch)

    return arm


def attendout(steps: int = T, generator_options: dict[str, Any] | None = None, **options: Any) -> Arm:
    """Return an arm with one round of AttendOut, scored on as many rows as one step has."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model(), shape.batch()
        game = AttackerDefender(
            model,
            attnreg.GNetProvider.for_model(model, **(generator_options or {"masks_per_layer": "heads"})).to(
                shape.device
            ),
            lambda network: adamw(network, LEARNING_RATE),
            rewards=Rewards([shape.batch(seed=1)]),
            rounds=Rounds(steps),
            accelerator=Accelerator(),
            **options,
        )

        def a_round() -> None:
            for _ in range(steps):
                game.step(batch)

        return a_round, steps

    return arm


def evaluation(attached: bool) -> Arm:
    """Return an arm with a forward pass in eval mode."""

    def arm(shape: Shape) -> tuple[Callable[[], object], int]:
        model, batch = shape.model().eval(), shape.batch()
        if attached:
            attnreg.attach(model, attnreg.AttentionDropout(P, "scores"))

        @torch.inference_mode()
        def forward() -> None:
            with Accelerator().autocast():
                model(**batch)

        return forward, 1

    return arm


def _step(method: TrainingMethod, batch: dict[str, torch.Tensor]) -> tuple[Callable[[], object], int]:
    return lambda: method.step(batch), 1


def weights(_: hf.PreTrainedModel) -> attnreg.Regularizer:
    """Make a provider that drops weights."""
    return attnreg.AttentionDropout(P)


def scores(_: hf.PreTrainedModel) -> attnreg.Regularizer:
    """Make a provider that drops scores."""
    return attnreg.AttentionDropout(P, "scores")


def asleep(_: hf.PreTrainedModel) -> attnreg.Regularizer:
    """Make a provider that is not active in the first epoch."""
    provider = attnreg.CrossTuning(attnreg.AttentionDropout(P, "scores"))
    provider.on_epoch(0)
    return provider


OWN_DROPOUT_OFF = {"attention_probs_dropout_prob": 0.0}
EAGER = fine_tuning(attention="eager", attention_probs_dropout_prob=P)
SDPA = fine_tuning(attention_probs_dropout_prob=P)
MASK_TO_SDPA = fine_tuning(attention="masked_sdpa", **OWN_DROPOUT_OFF)

ROWS: dict[str, Row] = {
    "FineTuning, no regularizer": Row(plain, plain_loop),
    "attached, not active": Row(fine_tuning(asleep), plain),
    "eval mode": Row(evaluation(True), evaluation(False)),
    "own dropout, seeded": Row(fine_tuning(seeded=True), plain),
    "AttentionDropout, weights": Row(fine_tuning(weights), plain),
    "AttentionDropout, scores": Row(fine_tuning(scores), plain),
    "AttentionDropout, weights, instead of the model's dropout": Row(
        fine_tuning(weights, **OWN_DROPOUT_OFF), plain, {"eager": EAGER, "SDPA's dropout_p": SDPA}
    ),
    "AttentionDropout, scores, instead of the model's dropout": Row(
        fine_tuning(scores, **OWN_DROPOUT_OFF), plain, {"eager": EAGER, "a mask for SDPA": MASK_TO_SDPA}
    ),
    "BernoulliScheduleProvider": Row(
        fine_tuning(lambda _: attnreg.BernoulliScheduleProvider([(0, 0.3), (1, 0)], 100)),
        plain,
    ),
    "AttentionLayerDrop, p = 1": Row(fine_tuning(lambda _: attnreg.AttentionLayerDrop(1.0)), plain),
    "AttentionLayerDrop, p = 0.2": Row(fine_tuning(lambda _: attnreg.AttentionLayerDrop(0.2)), plain),
    "AD-DROP, gradient, layer 0": Row(ad_drop(layers=[0]), plain),
    "AD-DROP, gradient, all layers": Row(ad_drop(), plain, {"official code": ad_drop(official=True)}),
    "AD-DROP, gradient, first pass in bfloat16": Row(ad_drop(first_pass_dtype="bfloat16"), plain),
    "AttendOut, a step of a round": Row(attendout(), plain),
    "AttendOut, rewards per sample": Row(attendout(credit=Reinforce(per="sample")), plain),
}
NEWER: dict[str, Make] = {
    "AdversarialAttention": attnreg.AdversarialAttention.for_model,
    "AttentionEntropy": lambda _: attnreg.AttentionEntropy(),
    "ConcreteDropout": attnreg.ConcreteDropout.for_model,
    "ContextualDropout": attnreg.ContextualDropout.for_model,
    "DropAttention": lambda _: attnreg.DropAttention(P, window=3),
    "DropHead": lambda _: attnreg.DropHead(P),
    "DropKey": lambda _: attnreg.DropKey(P),
    "DropKey, shared queries": lambda _: attnreg.DropKey(P, share_queries=True),
    "EmbeddingNoise": lambda _: attnreg.EmbeddingNoise(),
    "HeadMask, random": lambda _: attnreg.HeadMask(1),
    "HeadMask, importance": lambda _: attnreg.HeadMask(1, by="importance"),
    "HiddenCut": lambda _: attnreg.HiddenCut(P),
    "HiddenDropout": lambda _: attnreg.HiddenDropout(P),
    'HiddenDropout, `where="pooled"`, p = 0.9': lambda _: attnreg.HiddenDropout(0.9, where="pooled"),
    "HiddenKey": lambda _: attnreg.HiddenKey(P),
    "HiddenNoise": lambda _: attnreg.HiddenNoise(),
    "LayerDrop": lambda _: attnreg.LayerDrop(P),
    "LearnableBernoulli": attnreg.LearnableBernoulli.for_model,
    "RelaxedAttention": lambda _: attnreg.RelaxedAttention(),
    "Scheduled": lambda _: attnreg.Scheduled(attnreg.DropKey(), over="depth", p=[(0, 2 * P), (1, 0)]),
    "StructuralMask": lambda _: attnreg.StructuralMask(3),
    "TokenDropout": lambda _: attnreg.TokenDropout(P),
    "UniDrop": lambda _: attnreg.UniDrop(),
}
ROWS.update({name: Row(fine_tuning(make), plain) for name, make in NEWER.items()})
ROWS["RelaxedAttention, instead of the model's dropout"] = Row(
    fine_tuning(NEWER["RelaxedAttention"], **OWN_DROPOUT_OFF), plain
)
ROWS["SAM"] = Row(trained_by(SAM), plain)
ROWS["R-Drop"] = Row(trained_by(FineTuning, objective=RDropLoss()), plain)
ROWS["R3F"] = Row(trained_by(FineTuning, objective=R3FLoss()), plain)
ROWS["Child-Tuning, F"] = Row(trained_by(ChildTuning), plain)
ROWS["CrossEntropy, smoothing"] = Row(
    trained_by(lambda model, *args, **given: FineTuning(model, *args, loss_function=CrossEntropy(model, 0.1), **given)),
    plain,
)
ROWS["FreeLB, 3 passes"] = Row(trained_by(FineTuning, objective=FreeLBLoss()), plain)
ROWS["FreeLB, 2 passes (FGM)"] = Row(trained_by(FineTuning, objective=FreeLBLoss(2, start=0.0)), plain)
if find_spec("peft"):
    ROWS["LoRA with `LoRADropout`, over the same LoRA"] = Row(fine_tuning(lora=0.3), fine_tuning(lora=True))
    ROWS["LoRA by PEFT, AttentionDropout, scores"] = Row(fine_tuning(scores, lora=True), fine_tuning(lora=True))
#: FlexAttention cannot train on a CPU, where Inductor takes minutes to compile BERT-base's shape.
ON_GPUS: dict[str, Row] = {
    "compiled, over plain": Row(fine_tuning(compiled=True), plain),
    "compiled, AttentionDropout, weights, over compiled": Row(
        fine_tuning(weights, compiled=True), fine_tuning(compiled=True)
    ),
    "compiled, AttentionDropout, scores, over compiled": Row(
        fine_tuning(scores, compiled=True), fine_tuning(compiled=True)
    ),
    "FlexAttention, over SDPA": Row(
        fine_tuning(attention="flex_attention", **OWN_DROPOUT_OFF), fine_tuning(**OWN_DROPOUT_OFF)
    ),
    "FlexAttention, AttentionDropout, weights, over FlexAttention": Row(
        fine_tuning(weights, attention="flex_attention", **OWN_DROPOUT_OFF),
        fine_tuning(attention="flex_attention", **OWN_DROPOUT_OFF),
    ),
    "FlexAttention, AttentionDropout, scores, over FlexAttention": Row(
        fine_tuning(scores, attention="flex_attention", **OWN_DROPOUT_OFF),
        fine_tuning(attention="flex_attention", **OWN_DROPOUT_OFF),
    ),
}
LONG: dict[str, Row] = {
    "AD-DROP, integrated gradients, layer 0, 20 steps": Row(ad_drop(layers=[0], method="integrated_gradients"), plain)
}
MEMORY: dict[str, Arm] = {
    "plain": plain,
    "AttentionDropout, scores": fine_tuning(scores),
    "AD-DROP, gradient, all layers": ad_drop(),
    "AD-DROP, first pass alone": ad_drop(first_pass_alone=True),
    "AD-DROP, first pass alone, official code": ad_drop(official=True, first_pass_alone=True),
    **{f"AttendOut, T = {steps}": attendout(steps) for steps in (1, 8, 64)},
}
