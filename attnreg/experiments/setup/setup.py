"""Prepare a run: its task, data, model, seed and folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env, set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from attnreg.errors import InputError, UsageError
from attnreg.experiments.folder.history import STOPPING, Selection
from attnreg.experiments.folder.run_folder import RunFolder
from attnreg.experiments.options.provider import make_provider
from attnreg.experiments.options.settings import Settings
from attnreg.experiments.setup.batches import Labelled, TrainBatches, in_order, to_score
from attnreg.experiments.setup.device import choose_device, set_threads
from attnreg.experiments.setup.rows import RunData, data_warnings, read_data, split_off
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.models.lora import adapter_base, is_adapted, parameter_counts, summary, with_lora
from attnreg.experiments.tasks.models.pooling import saved_pooling
from attnreg.experiments.tasks.models.pretrained import load_pretrained, longest_input
from attnreg.outputs import IGNORED, LossFunction
from attnreg.regularizer.base import Regularizer
from attnreg.training.cross_entropy import CrossEntropy, balanced_weights
from attnreg.training.lora_dropout import LoRADropout
from attnreg.training.method import Batch, add_learned
from attnreg.training.start import adamw, noisy_tune, reinitialize_top

WARNING = "Warning: "  # begins a remark
_ON_SHARDS = ("finetune", "regularize", "ad-drop", "attention-dropout", "attention-layerdrop", "scheduled-bernoulli")
_SHARDED = (
    "Recipes do not support {}, because they copy and inspect whole models. Use data parallelism (`torchrun`, "
    "`accelerate launch --multi_gpu`), on GPUs FSDP2 (`--use_fsdp --fsdp_version 2`), or shard in your training loop."
)


class Setup:
    """The task, data, model and folder of a run. The same seed gives every recipe the same new head and data order.

    Raises:
        InputError: if the options, the data and the model do not fit together. Nothing is written then.
    """

    seconds_before: tuple[float, float] | None = None  #: clock and CPU time of a fit before training
    asleep: str | None = None  #: why the regularizer never acts, if so

    def __init__(self, settings: Settings, data: RunData | None = None) -> None:
        self.settings, self.scored_on, self.epochs = settings, settings.scored_on, settings.epochs
        self.held_out: dict[str, int] | None = None
        self.folder = RunFolder(settings.output_dir)
        self.task, splits, train, dev = data or read_data(settings)
        self.folder.check(settings)
        self.accelerator = make_accelerator(settings)
        self.folder.writer = self.accelerator.is_main_process
        set_seed(settings.seed)
        self.model, self.tokenizer, doubts = self._load()
        self.parameters = parameter_counts(self.model)
        #: sentences that are printed before training and repeated in the report
        self.remarks: list[str] = [*self._adapt()]
        max_length = longest_input(self.model, settings.max_length, self.task.max_length)
        self.kind = kind_class(self.task.kind)(self.task, self.tokenizer, max_length)
        if self.accelerator.is_fsdp2:
            self._check_sharded()
        self.train_rows = self.kind.to_train_on(encoded := self.kind.encode(train))
        self.dev_rows = self.kind.encode(dev)
        whole_splits = {name: splits[name] for name in ("train", "validation") if name in splits}
        doubts = *doubts, *data_warnings(self.kind, train, dev, self.scored_on, whole_splits)
        if untrained := len(encoded) - len(self.train_rows):
            lacking = f"training inputs lack {self.kind.learns_from}: they are left out."
            doubts = *doubts, f"{untrained} of {len(encoded)} {lacking}"
        adapted = [summary(self.model)] if is_adapted(self.model) else []
        self.remarks += [*adapted, *self.kind.remarks, *(f"{WARNING}{doubt}" for doubt in doubts)]
        if settings.prompt_weight and not any(IGNORED in row for row in self.train_rows["labels"][:]):
            raise UsageError(f"--prompt-weight needs prompts, but {self.task.name} has plain texts: remove it.")
        #: the rows that the run is scored on, in order
        self.dev = self.labelled(self.dev_rows)
        #: further validation sets of the task, by name
        self.further = {
            name.removeprefix("validation_"): self.labelled(self.kind.encode(splits[name]))
            for name in self.task.validation[1:]
            if name in splits and self.scored_on == "dev"
        }
        #: the rows held out of the whole run, before all others, for ``--patience`` or ``--select best``, if any
        self.stopping: Labelled | None = None
        if settings.stop_on == "held-out":
            size = settings.stopping_rows or min(256, max(1, len(self.train_rows) // 10))
            self.train_rows, held_out = self._split(self.train_rows, size, "--stopping-rows")
            self.stopping = self.labelled(held_out)
        self._rows_left, self._held_until = self.train_rows, 0
        self._batches: dict[bool, TrainBatches] = {}  # by whether rows are held out

    def _adapt(self) -> Iterator[str]:
        """Set the threads, and change weights as options say; yield a remark per change."""
        settings = self.settings
        threads = set_threads(settings.threads, self.parameters["all"])
        if self.accelerator.device.type == "cpu":
            yield f"CPU threads: {threads} (--threads)."
        if (pooling := saved_pooling(self.model.config)) not in (None, "own"):
            yield f"The head reads pooled states: {pooling} (--pooling)."
        if settings.reinit_layers:
            names = reinitialize_top(self.model, settings.reinit_layers)
            yield f"--reinit-layers re-initialized {', '.join(names)}."
        if settings.noisy_tune:
            noisy_tune(self.model, settings.noisy_tune)

    def train_batches(self, epoch: int) -> TrainBatches:
        """Return the training batches of an epoch. Call :meth:`hold_out_rows` before, if at all."""
        is_held = epoch < self._held_until
        if is_held not in self._batches:
            rows, settings = self._rows_left if is_held else self.train_rows, self.settings
            here = self.accelerator
            self._batches[is_held] = TrainBatches(
                rows, settings.batch_size, self.kind, settings.seed, here.device,
                rank=here.process_index, processes=here.num_processes,
            )  # fmt: skip
        return self._batches[is_held]

    @property
    def evaluated(self) -> dict[str, Labelled]:
        """All sets to evaluate during training, by name; the name of :attr:`dev` is empty."""
        return {"": self.dev, **self.further, **({} if self.stopping is None else {STOPPING: self.stopping})}

    def selection(self) -> Selection:
        """Return the rule that chooses the network to keep."""
        metric = self.task.metric
        key = metric if self.stopping is None else f"{STOPPING}_{metric}"
        return Selection(key, self.settings.patience, self.settings.select == "best")

    @property
    def warnings(self) -> list[str]:
        """The warnings among the remarks, and why the regularizer never acts."""
        warnings = [remark.removeprefix(WARNING) for remark in self.remarks if remark.startswith(WARNING)]
        return warnings if self.asleep is None else [*warnings, self.asleep]

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps in the whole run."""
        return self.steps_in(self.epochs)

    def make_provider(self, expression: str) -> Regularizer:
        """Make a provider for the model and the number of steps from the value of an option such as ``--provider``."""
        return make_provider(expression, self.model, self.total_steps)

    def steps_in(self, epochs: int) -> int:
        """Return the number of optimizer steps in the first ``epochs`` epochs."""
        return sum(len(self.train_batches(epoch)) for epoch in range(epochs))

    def hold_out_rows(self, size: int, epochs: int | None = None) -> Any:
        """Hold rows out from the training data (the last ones of the shuffled rows) and return them.

        Args:
            size: number of rows.
            epochs: hold them out in the first ``epochs`` epochs only; ``None`` holds them out of the whole run.

        Raises:
            InputError: if no row is left to train on.
        """
        rows = self.train_rows
        self.train_rows, held_out = self._split(rows, size)
        self.held_out = {"rows": len(held_out), "epochs": self.epochs if epochs is None else min(epochs, self.epochs)}
        if epochs is not None and epochs < self.epochs:
            self._rows_left, self.train_rows, self._held_until = self.train_rows, rows, epochs
        return held_out

    def _check_sharded(self) -> None:
        """Refuse under FSDP2 options that were not compared with a whole model, or cannot be right on a part of it."""
        options = ("lora_rank", "mixed_precision", "ema", "linear_probe")
        flags = [self.settings.flag(name) for name in options if getattr(self.settings, name)]
        if self.settings.wise_ft != 1.0:
            flags.append("--wise-ft")
        if self.kind.generates:
            flags.append("a task whose answers are generated")
        if self.settings.recipe not in _ON_SHARDS:
            flags.append(f"recipe {self.settings.recipe}")
        if flags:
            raise InputError(
                f"FSDP2 is for recipes {', '.join(_ON_SHARDS)}, on whole models in float32, and not for "
                f"{', '.join(flags)}. Use data parallelism (`torchrun`, `accelerate launch --multi_gpu`)."
            )

    def _split(self, rows: Any, size: int, flag: str | None = None) -> tuple[Any, Any]:
        """Split off the last rows; a few more where the split would divide the windows of a row."""
        return split_off(rows, size, self.kind.divided(rows, max(0, len(rows) - size)), flag)

    def _load(self) -> tuple[Any, Any, Sequence[str]]:
        """Load the model, perhaps with LoRA, and its tokenizer; return also doubts whether this model was meant."""
        settings = self.settings
        if settings.model is not None and adapter_base(settings.model) is not None:
            raise InputError(
                f"--model {settings.model} holds an adapter, not a whole model: merge it (`merge_and_unload` of peft) "
                "and save the model in another folder, or train from the adapter's base model."
            )
        choices: list[Any] = [settings.model, settings.model_dropout, settings.pooling]
        model, tokenizer, new_weights, doubts = load_pretrained(self.task, *choices)
        if settings.lora_rank is None:
            return model, tokenizer, doubts
        if new_weights is None:
            raise InputError("LoRA adapts a pretrained model, but the task's model has random weights: use --model.")
        adapted = with_lora(
            model,
            kind_class(self.task.kind).head,
            new_weights,
            rank=settings.lora_rank,
            targets=settings.lora_targets,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
        )
        if settings.lora_matrix_dropout or settings.lora_rank_dropout:
            LoRADropout(adapted, settings.lora_matrix_dropout, settings.lora_rank_dropout)
        return adapted, tokenizer, doubts

    def rows_in_order(self, rows: Any) -> list[Batch]:
        """Batch encoded rows in their order."""
        return in_order(rows, self._rows_at_a_time, self.kind, self.accelerator.device)

    def labelled(self, rows: Any) -> Labelled:
        """Batch encoded rows to be scored, together with their reference answers."""
        return to_score(rows, self._rows_at_a_time, self.kind, self.accelerator.device)

    @property
    def _rows_at_a_time(self) -> int:
        return max(1, self.settings.batch_size * 2 // self.settings.gradient_accumulation)

    @functools.cached_property
    def loss_function(self) -> LossFunction | None:
        """The training loss that options choose (class weights come from the training rows), else ``None``."""
        if self.settings.class_weights is not None:
            weights = balanced_weights(self.train_rows["labels"][:], len(self.task.labels))
            return CrossEntropy(self.model, weights=weights)
        if self.settings.label_smoothing or self.settings.prompt_weight:
            return CrossEntropy(self.model, self.settings.label_smoothing, self.settings.prompt_weight)
        return None

    @property
    def loss_flags(self) -> str:
        """The options that choose the training loss."""
        names = ("class_weights", "label_smoothing", "prompt_weight")
        return ", ".join(self.settings.flag(name) for name in names if getattr(self.settings, name))

    @property
    def method_flags(self) -> dict[str, str]:
        """The options of the command line that set arguments of a training method, by argument."""
        flags = {"micro_batches": "--gradient-accumulation", "max_grad_norm": "--max-grad-norm"}
        return {"loss_function": self.loss_flags, **flags}

    @property
    def method_options(self) -> dict[str, Any]:
        """The arguments of a training method for which options of the command line differ from its defaults."""
        settings = self.settings
        arguments = {
            "loss_function": (self.loss_function, None),
            "micro_batches": (settings.gradient_accumulation, 1),
            "max_grad_norm": (settings.max_grad_norm or None, 1.0),
        }
        return {name: value for name, (value, default) in arguments.items() if value != default}

    def optimizer(
        self, model: nn.Module, provider: Regularizer | None = None, provider_lr: float | None = None
    ) -> Optimizer:
        """Make AdamW with the run's learning rate and weight decay.

        Args:
            model: the network.
            provider: a provider whose parameters are learned together with the network's.
            provider_lr: learning rate of the provider (default: the network's).
        """
        settings = self.settings
        rates = settings.learning_rate, settings.weight_decay
        optimizer = adamw(model, *rates, layerwise_decay=settings.layerwise_decay)
        if provider is not None:
            add_learned(optimizer, provider, settings.learning_rate if provider_lr is None else provider_lr)
        return optimizer

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Make the schedule that ``--schedule`` names, with the warm-up of ``--lr-warmup``."""
        from transformers import get_scheduler  # late: it is slow to import

        warmup_steps = int(self.settings.lr_warmup * self.total_steps)
        return get_scheduler(self.settings.schedule, optimizer, warmup_steps, self.total_steps)

    def tracked(self) -> AbstractContextManager[None]:
        """Also send logs to the trackers within the block."""
        return tracked(self.accelerator, {**self.settings.to_dict(), **self.settings.own})

    def log_telemetry(self, line: Mapping[str, Any]) -> None:
        """Write a line to ``telemetry.jsonl`` and to the trackers."""
        self.folder.append("telemetry", line)
        self.accelerator.log(flattened(line), step=line["step"])

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Write a line to ``metrics.jsonl`` and to the trackers."""
        self.folder.append("metrics", record)
        numbers = {name: value for name, value in record.items() if name not in ("network", "step", "drop_rate")}
        self.accelerator.log(flattened(numbers, self.scored_on, record["network"]), step=record["step"])


def make_accelerator(settings: Settings) -> Accelerator:
    """Make the accelerator of a run; refuse settings that it does not support here."""
    device = choose_device(settings.device)
    for name in ("DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise InputError(_SHARDED.format(name))
    try:
        accelerator = Accelerator(
            # Without an accelerator device this must be explicit, or several processes would each train alone.
            cpu=device.type == "cpu",
            mixed_precision=settings.mixed_precision or "no",
            log_with=list(settings.report_to) or None,
            project_dir=settings.output_dir,
        )
    except ValueError as error:
        precision = settings.mixed_precision or "float32"
        raise InputError(f"Precision {precision} is not available here: {error}") from error
    processes, accumulation = accelerator.num_processes, settings.gradient_accumulation
    share, remainder = divmod(settings.batch_size, processes)
    if remainder:
        raise InputError(
            f"Expected --batch-size, which counts the rows of all {processes} processes, to be a multiple of "
            f"{processes}, got {settings.batch_size}."
        )
    if accumulation > share:
        raise InputError(f"Expected --gradient-accumulation of at most {share}, a batch's rows, got {accumulation}.")
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and not accelerator.is_fsdp2:
        raise InputError(_SHARDED.format("FSDP1, or FSDP2 on CPUs,"))
    return accelerator


@contextmanager
def tracked(accelerator: Accelerator, options: Mapping[str, Any]) -> Iterator[None]:
    """Run the accelerator's trackers within the block, with the options of a run."""
    plain = {name: value for name, value in options.items() if isinstance(value, (int, float, str, bool))}
    accelerator.init_trackers("attnreg", config=plain)
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()  # not `end_training`, which would also destroy the process group


def flattened(record: Mapping[str, Any], *prefix: str) -> dict[str, float]:
    """Flatten the numbers of a nested record; keys become paths. Lists, such as drop rates by head, are left out."""
    from transformers.utils.generic import flatten_dict  # late: it is slow to import

    flat = flatten_dict({**record}, "/".join(prefix), delimiter="/")
    return {name: value for name, value in flat.items() if isinstance(value, (int, float))}
