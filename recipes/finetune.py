import attnreg
from attnreg.experiments import recipe


@recipe("finetune")
def finetune(run: "attnreg.experiments.Run") -> None:
    """Plain fine-tuning, the baseline of every comparison.

    Example: attnreg recipe finetune --task cola --seed 1
    """
    run.report(run.train(attnreg.training.FineTuning))
