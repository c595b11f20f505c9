import attnreg
from attnreg.experiments import argument, recipe


@recipe("r-drop", argument("attnreg.training:RDropLoss", "alpha"))
def r_drop(run: "attnreg.experiments.Run", alpha: float) -> None:
    """R-Drop: two forward passes under different dropout must agree.

    Example: attnreg recipe r-drop --task cola --alpha 0.5
    """
    run.report(run.train(objective=attnreg.training.RDropLoss(alpha)))
