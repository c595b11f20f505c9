import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click
import torch
from typing_extensions import override

import attnreg
from attnreg.errors import InputError, UsageError
from attnreg.experiments import option, recipe
from attnreg.outputs import loss_of
from attnreg.training import FineTuning, StepResult

DEFAULTS = {"epochs": 1, "schedule": "linear", "layerwise_decay": 1.0}  # of setfit


class SetFit(FineTuning):
    """Trains the body on pairs and fits the head in its first step; every step returns the loss of its batch."""

    def __init__(self, run: "attnreg.experiments.Run", pairs: int) -> None:
        super().__init__(run.model, run.optimizer(run.model), accelerator=run.accelerator)
        self._run, self._pairs, self._is_trained = run, pairs, False

    @override
    def step(self, batch: Mapping[str, torch.Tensor]) -> StepResult:
        if not self._is_trained:
            self._train_body()
            attnreg.experiments.fit_linear_head(self.model, self._run.rows_in_order(self._run.train_rows))
            self._is_trained = True
        with torch.no_grad():
            return StepResult(self.updater.mean(loss_of(self.model.eval()(**batch), batch, self.loss_function)))

    def _train_body(self) -> None:
        from datasets import Dataset
        from sentence_transformers import SentenceTransformer
        from setfit import SetFitModel, Trainer, TrainingArguments

        run, settings = self._run, self._run.settings
        body = SentenceTransformer(settings.model, device=str(run.accelerator.device))
        body[0].model = self.model.base_model  # the body that the head reads, with its pooling
        body.max_seq_length = run.kind.max_length
        texts = run.tokenizer.batch_decode(run.train_rows["input_ids"][:], skip_special_tokens=True)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                batch_size=settings.batch_size,
                num_epochs=1,
                num_iterations=self._pairs,
                body_learning_rate=settings.learning_rate,
                l2_weight=settings.weight_decay,
                warmup_proportion=settings.lr_warmup,
                seed=settings.seed,
                report_to="none",
                save_strategy="no",
                show_progress_bar=False,
            )
            rows = Dataset.from_dict({"text": texts, "label": run.train_rows["labels"][:]})
            Trainer(SetFitModel(body, model_head=None), arguments, rows).train_embeddings(rows["text"], rows["label"])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_trained": self._is_trained}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_trained = state["is_trained"]


@recipe(
    "set-fit",
    option("--pairs", type=click.IntRange(min=1), default=20,
           help="Pairs of the same class, and as many of different classes, per row."),
    defaults={"epochs": 1},
)  # fmt: skip
def set_fit(run: "attnreg.experiments.Run", pairs: int) -> None:
    """SetFit: draw the states of a class together by pairs of rows, then fit the head.

    The package setfit makes the pairs and trains on them (Tunstall et al., 2022).

    Example: attnreg recipe set-fit --model MODEL --shots 8
    """
    try:
        import setfit  # noqa: F401
    except ImportError as error:
        raise InputError("set-fit needs setfit: pip install setfit.") from error
    settings = run.settings
    if run.task.kind != "classification" or len(run.task.columns) != 1:
        raise UsageError(f"set-fit classifies single texts, but {run.task.name} has other rows.")
    if settings.model is None or settings.pooling == "own" or settings.lora_rank is not None:
        raise UsageError(
            "set-fit needs a pretrained --model, with --pooling mean, cls or last, and without --lora-rank."
        )
    if run.accelerator.num_processes > 1:
        raise UsageError("set-fit runs in one process.")
    ignored = [name for name, default in DEFAULTS.items() if getattr(settings, name) != default]
    if ignored or run.method_options:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in (*ignored, *run.method_options))
        raise UsageError(f"set-fit trains as setfit does, without {flags}: remove it.")
    rows = Counter(run.train_rows["labels"][:])
    if len(rows) < 2 or min(rows.values()) < 2:
        raise InputError(f"set-fit needs at least two classes, of two rows or more, got {sorted(rows.values())}.")
    run.report(run.fit(SetFit(run, pairs)), notes=["The body was trained in float32."])
