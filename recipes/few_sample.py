import attnreg
from attnreg.experiments import recipe


@recipe("few-sample", defaults={"layerwise_decay": 0.95, "reinit_layers": 2})
def few_sample(run: "attnreg.experiments.Run") -> None:
    """Fine-tuning for few rows: layer-wise learning rates, and top blocks that start anew.

    Example: attnreg recipe few-sample --task rte --shots 100 --epochs 20
    """
    run.report(run.train(attnreg.training.FineTuning))
