import attnreg
from attnreg.experiments import argument, recipe


@recipe("sam", argument("attnreg.training:SAM", "rho"))
def sam(run: "attnreg.experiments.Run", rho: float) -> None:
    """SAM: each step follows the gradient at the worst weights nearby.

    Example: attnreg recipe sam --task cola --rho 0.1
    """
    run.report(run.train(attnreg.training.SAM, rho=rho))
