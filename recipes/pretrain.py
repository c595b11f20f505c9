import math

import click

import attnreg
from attnreg.experiments import provider_option, recipe


@recipe("pretrain", provider_option(required=False), task="agreement-words")
def pretrain(run: "attnreg.experiments.Run", provider: str | None, provider_lr: float) -> None:
    """Masked-language-model pre-training, plain or under any provider.

    Example: attnreg recipe pretrain --provider "AttentionDropout(0.1, placement='scores')"
    """
    if run.task.kind != "masked-lm":
        raise click.UsageError(
            f"Pre-training needs a task of plain text, got {run.task.name}: use agreement-words, or --task custom "
            "--kind masked-lm --text-columns NAME."
        )
    parsed = None if provider is None else run.make_provider(provider)
    history = run.train(provider=parsed, provider_lr=provider_lr)
    loss = history.of("model")[-1]["loss"]
    run.report(history, notes=[f"Perplexity of the hidden words: {math.exp(loss):.2f}."])
