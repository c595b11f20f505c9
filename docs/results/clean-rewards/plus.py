"""Plain fine-tuning on the training rows and the validation rows together, the latter with their right labels.

attnreg recipe docs/results/clean-rewards/plus.py --task sst2 --data-dir DATA/sst2_sentences --label-noise 0.4
"""

from datasets import concatenate_datasets

import attnreg
from attnreg.experiments import recipe


@recipe("plus")
def plus(run: "attnreg.experiments.Run") -> None:
    """Plain fine-tuning that also trains on the validation rows."""
    run.train_rows = concatenate_datasets([run.train_rows, run.kind.to_train_on(run.dev_rows)])
    note = f"Trained on {len(run.train_rows)} rows, {len(run.dev_rows)} of them of dev: dev scores say nothing."
    run.report(run.train(attnreg.training.FineTuning), notes=[note])
