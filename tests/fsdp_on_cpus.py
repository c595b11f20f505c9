"""``python -m attnreg`` under FSDP2 on CPUs, where accelerate itself shards nothing: its state is told that it does."""

import accelerate
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from attnreg.experiments.cli.main import main
from attnreg.experiments.setup import setup


class Sharding(accelerate.Accelerator):
    """An accelerator of several CPU processes that shards each layer of a BERT."""

    def __init__(self, **options):
        super().__init__(**options)
        self.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["BertLayer"]
        )


if __name__ == "__main__":
    setup.Accelerator = Sharding
    main(prog_name="attnreg")
