import attnreg
from attnreg.experiments import recipe


@recipe("lp-ft", defaults={"linear_probe": True})
def lp_ft(run: "attnreg.experiments.Run") -> None:
    """LP-FT: fit the head on the pretrained features first, then fine-tune the whole model.

    Example: attnreg recipe lp-ft --task sst2 --model MODEL --pooling mean
    """
    run.report(run.train(attnreg.training.FineTuning))
