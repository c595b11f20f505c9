"""Masked-language-model pre-training, plain or under any provider."""

import math

import click

import attnreg
from attnreg.training import provider_option, recipe


@recipe(
    "pretrain",
    provider_option(required=False),
    click.option("--provider-lr", type=click.FloatRange(min=0), default=1e-2, show_default=True,
                 help="Learning rate of what a provider learns."),
    task="agreement-words",
)  # fmt: skip
def pretrain(run: "attnreg.training.Run", provider: str | None, provider_lr: float) -> None:
    """Masked-language-model pre-training, plain or under any provider.

    Example: attnreg recipe pretrain --provider "AttentionDropout(0.1, placement='scores')"
    """
    if run.task.kind != "masked-lm":
        raise click.UsageError(
            "Expected a task of text alone, agreement-words or --task custom --kind masked-lm --text-columns NAME, got "
            f"{run.task.name}."
        )
    parsed = None if provider is None else attnreg.parse_provider(provider, run.model, run.total_steps)
    optimizer = run.optimizer(run.model, parsed, provider_lr)
    schedule = run.schedule(optimizer)
    method: attnreg.training.TrainingMethod
    if parsed is None:
        method = attnreg.training.FineTuning(run.model, optimizer, scheduler=schedule, accelerator=run.accelerator)
    else:
        method = attnreg.training.TwoPass(run.model, optimizer, parsed, scheduler=schedule, accelerator=run.accelerator)
    history = attnreg.training.fit(method, run)
    loss = history.of(method.returned_name)[-1]["loss"]
    attnreg.training.report(run, history, notes=[f"Perplexity of the hidden words: {math.exp(loss):.2f}."])
