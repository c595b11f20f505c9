import attnreg
from attnreg.experiments import argument, recipe


@recipe("attention-layerdrop", argument("attnreg:AttentionLayerDrop", "p", "--drop-rate"))
def attention_layerdrop(run: "attnreg.experiments.Run", p: float) -> None:
    """Attention LayerDrop: random layers attend to all positions equally.

    Example: attnreg recipe attention-layerdrop --task cola --drop-rate 0.1
    """
    run.report(run.train(provider=attnreg.AttentionLayerDrop(p)))
