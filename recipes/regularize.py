import attnreg
from attnreg.experiments import provider_option, recipe


@recipe("regularize", provider_option())
def regularize(run: "attnreg.experiments.Run", provider: str, provider_lr: float) -> None:
    """Fine-tuning under any provider, or several joined by &.

    Example: attnreg recipe regularize --provider "OnLayers(AttentionLayerDrop(0.2), [0]) & AttentionDropout(0.1)"
    """
    run.report(run.train(provider=run.make_provider(provider), provider_lr=provider_lr))
