"""R-Drop: each batch goes forward twice under different dropout, and the predictions must agree."""

import click

import attnreg
from attnreg.training import recipe


@recipe("r-drop", click.option("--alpha", type=click.FloatRange(min=0), default=1.0, show_default=True))
def r_drop(run: "attnreg.training.Run", alpha: float) -> None:
    """R-Drop: each batch goes forward twice under different dropout, and the predictions must agree.

    Example: attnreg recipe r-drop --task cola --alpha 0.5
    """
    optimizer = run.optimizer(run.model)
    method = attnreg.training.RDrop(
        run.model, optimizer, alpha=alpha, scheduler=run.schedule(optimizer), accelerator=run.accelerator
    )
    history = attnreg.training.fit(method, run)
    attnreg.training.report(run, history)
