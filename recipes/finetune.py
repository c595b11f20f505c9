"""Plain fine-tuning: no attention regularizer, the baseline of every comparison."""

import attnreg
from attnreg.training import recipe


@recipe("finetune")
def finetune(run: "attnreg.training.Run") -> None:
    """Plain fine-tuning: no attention regularizer, the baseline of every comparison.

    Example: attnreg recipe finetune --task cola --seed 1
    """
    optimizer = run.optimizer(run.model)
    method = attnreg.training.FineTuning(
        run.model, optimizer, scheduler=run.schedule(optimizer), accelerator=run.accelerator
    )
    history = attnreg.training.fit(method, run)
    attnreg.training.report(run, history)
