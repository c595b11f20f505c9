import copy

import click

import attnreg
from attnreg.experiments import Numbers, option, recipe


@recipe(
    "soup",
    option("--factors", type=Numbers(click.FloatRange(0, min_open=True), "factors such as 0.4,1,2"), default="0.4,1,2",
           help="Learning rates of the networks, relative to --learning-rate."),
    excludes=[("lora_rank", "takes the mean of whole weights, of which LoRA trains only factors")],
)  # fmt: skip
def soup(run: "attnreg.experiments.Run", factors: list[float]) -> None:
    """Soup: train with several learning rates at once, and keep the mean of their weights.

    Example: attnreg recipe soup --task sst2 --model MODEL --factors 0.5,1,1,2
    """
    networks = [run.model, *(copy.deepcopy(run.model) for _ in factors[1:])]
    methods = []
    for network, factor in zip(networks, factors, strict=True):
        optimizer = run.optimizer(network)
        for group in optimizer.param_groups:
            group["lr"] *= factor
        options = {**run.method_options, "scheduler": run.schedule(optimizer), "accelerator": run.accelerator}
        methods.append(attnreg.training.FineTuning(network, optimizer, **options))
    run.report(run.fit(attnreg.training.Averaged(methods)))
