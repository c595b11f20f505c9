import attnreg
from attnreg.experiments import argument, recipe


@recipe("hiddenkey", argument("attnreg:HiddenKey", "p"), argument("attnreg.training:RDropLoss", "alpha"))
def hiddenkey(run: "attnreg.experiments.Run", p: float, alpha: float) -> None:
    """HiddenKey: dropout of keys and hidden states, and two passes that must agree.

    Example: attnreg recipe hiddenkey --task cola --p 0.1
    """
    run.report(run.train(provider=attnreg.HiddenKey(p), objective=attnreg.training.RDropLoss(alpha)))
