"""Classifier and regressor of texts in the way of scikit-learn: the best of several ways to train a model on rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from numpy.typing import NDArray
from scipy import special
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted
from typing_extensions import Self

from attnreg._files import replaced_folder
from attnreg.arguments import whole_number
from attnreg.errors import AttnRegWarning, InputError, counted
from attnreg.experiments.fit.answers import OF_NUMBERS, Answers
from attnreg.experiments.fit.clock import Clock, seconds_of
from attnreg.experiments.fit.outcome import Outcome
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import COLUMNS, Rows, texts_in
from attnreg.experiments.fit.soup import trained_on_all
from attnreg.experiments.fit.tries import Bench, logits_of
from attnreg.experiments.folder.run_folder import OutputFolder
from attnreg.experiments.options.files import checksum_if_there
from attnreg.experiments.setup.batches import to_score
from attnreg.experiments.setup.device import choose_device
from attnreg.experiments.setup.rows import input_warnings, label_warnings
from attnreg.experiments.tasks.built_in import TASKS
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.models.lora import adapter_base
from attnreg.experiments.tasks.models.mean_layer import pool_mean, with_mean_layer
from attnreg.experiments.tasks.models.pooling import saved_pooling
from attnreg.experiments.tasks.models.pretrained import load_pretrained, longest_input

LONGEST = 512  # tokens of a text, unless it is asked for more
_BATCH = 16  # rows
_KEY = "attnreg_fit"  # in a model's config.json
_UNKNOWN = 1 / 2  # share of unknown tokens above which a text cannot be judged
SETUP = "fit.json"  # the settings of a fit, in its folder


class TextModel(BaseEstimator):
    """The base of classifier and regressor: it races ways to train a pretrained model, and keeps the best model."""

    columns_: list[str]
    network_: Any
    outcome_: Outcome
    answers_: Answers
    _numbers: ClassVar[bool]  #: whether labels are numbers
    _kind: Kind
    _device: torch.device

    def __init__(
        self,
        model: str | Path = "sentence-transformers/all-MiniLM-L6-v2",
        *,
        budget: str | float = "15m",
        metric: str | None = None,
        max_length: int | None = None,
        seed: int = 0,
        device: str | None = None,
        folder: str | Path | None = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.budget = budget
        self.metric = metric
        self.max_length = max_length
        self.seed = seed
        self.device = device
        self.folder = folder
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.string, tags.non_deterministic = False, True, True
        return tags

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:  # noqa: N803 (scikit-learn's name)
        """Fit to texts, or pairs of texts, and their labels; all rows of one of the ``groups`` are in one fold."""
        seconds, seed, max_length = seconds_of(self.budget), self._seed, self._max_length
        # Rows of a file are checked already.
        rows = X if isinstance(X, Rows) else Rows.checked(X, y, groups, metric=self.metric, numbers=self._numbers)
        say: Callable[[str], None] = print if self.verbose else lambda text: None
        clock, folds = Clock(seconds, say), None if self.folder is None else self._folds(Path(self.folder), rows)
        self.__dict__.pop("network_", None)  # a fit that is stopped, or fails, leaves no model that predicts
        self.answers_, self.columns_ = rows.answers, [*rows.columns]
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus), ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())  # the race chooses another number
            torch.manual_seed(seed)
            pretrained = self._load(str(self.model))
            dataset = self._dataset(rows.texts, rows.labels.tolist())
            longest = replace(self._kind, max_length=longest_input(pretrained, max_length, LONGEST))
            for message in (*label_warnings(self._kind, dataset), *input_warnings(longest, dataset, "texts")):
                warnings.warn(message, AttnRegWarning, stacklevel=2)
            bench = Bench(pretrained, self._kind, dataset, _BATCH, self._device, seed, clock.paced)
            bench.balanced = self.answers_.metric == "macro_f1"  # which counts all classes alike
            bench.longest = longest.max_length
            race = Race(bench, rows, clock, seed, folds)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "A worker stopped")  # loky restarts a process whose memory has grown
            stack.callback(race.processes.stop)
            self.outcome_ = race.run()
            network, self.outcome_.averaged = trained_on_all(race, best := self.outcome_.best)
            network = bench.tokens.whole(network)
            self._kind = bench.encoded[best.max_length].kind
            if self._numbers:  # it was trained on standardized numbers
                bench.rescale(network, self.answers_.scale, self.answers_.center)
            else:  # transformers alone then predicts calibrated probabilities, too
                bench.rescale(network, 1 / self.outcome_.temperature)
            self.network_ = with_mean_layer(network) if self._pools else network
        self.best_, self.score_ = str(self.outcome_.best), tuple(self.outcome_.estimate)
        return self

    def outputs(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the outputs of the network for texts, ``(n, outputs)``: logits of classes, or one number."""
        check_is_fitted(self, "network_")
        names = [*map(str, getattr(X, "columns", ()))]  # by which a frame is read, not by position
        if {*self.columns_} <= {*names} and len({*names}) == len(names):
            X = X[[X.columns[names.index(column)] for column in self.columns_]]  # noqa: N806
        texts = texts_in(X)
        if not texts:
            return np.empty((0, self.answers_.outputs))
        if len(texts[0]) != len(self.columns_):
            expected = counted(len(self.columns_), "text")
            raise InputError(f"Expected {expected} per row, got {len(texts[0])}.")
        encoded = self._kind.encode(self._dataset(texts, [0] * len(texts)))
        return logits_of(self.network_, to_score(encoded, 64, self._kind, self._device), self._kind)

    def doubt(self, texts: Sequence[str]) -> str:
        """Return why the texts of a row cannot be judged, or only in part; an empty text if they can."""
        if not any(text.strip() for text in texts):
            return "no text"
        tokenizer = self._kind.tokenizer
        ids = tokenizer(*texts, add_special_tokens=True)["input_ids"]
        unknown = sum(token == tokenizer.unk_token_id for token in ids)
        if unknown > _UNKNOWN * max(1, len(ids) - tokenizer.num_special_tokens_to_add(len(texts) > 1)):
            return "most of it is unknown to the tokenizer"
        return f"cut at {self._kind.max_length} tokens" if len(ids) > self._kind.max_length else ""

    def save(self, folder: str | Path) -> None:
        """Write the model to a folder, as transformers loads it; :meth:`load` reads it.

        Args:
            folder: a new or empty folder, or one with a model of a fit, which is replaced.

        Raises:
            InputError: if the folder holds other files.
        """
        check_is_fitted(self, "network_")
        path = Path(folder).resolve()
        config = path / "config.json"
        is_fit = config.is_file() and _KEY in config.read_text(encoding="utf-8")
        if path.is_file() or (path.is_dir() and any(path.iterdir()) and not is_fit):
            raise InputError(f"{path} holds other files than a model of a fit: save into another folder.")
        classes = None if self.answers_.classes is None else self.answers_.classes.tolist()
        saved = {"classes": classes, "columns": self.columns_}
        saved |= {"metric": self.answers_.metric, "max_length": self._kind.max_length}
        setattr(self.network_.config, _KEY, saved)
        with replaced_folder(path) as target:
            self.network_.save_pretrained(target)
            self._kind.tokenizer.model_max_length = self._kind.max_length  # at which pipelines cut texts
            self._kind.tokenizer.save_pretrained(target)

    @classmethod
    def load(cls, folder: str | Path, device: str | None = None) -> Self:
        """Load a model that :meth:`save` has written."""
        import transformers

        path = Path(folder) / "model" if (Path(folder) / "model").is_dir() else Path(folder)
        if not path.is_dir():
            raise InputError(f"There is no folder {path}.")
        if (path / SETUP).is_file():
            raise InputError(f"The fit in {folder} has not finished: repeat its `attnreg fit` command to continue it.")
        try:
            config = transformers.AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise InputError(f"No model in {path}: {error}") from error
        if (saved := getattr(config, _KEY, None)) is None:
            raise InputError(
                f"The model in {path} was not saved by `attnreg fit`: give the folder of its run, or load it with "
                "transformers."
            )
        kind = TextRegressor if saved["classes"] is None else TextClassifier
        if not issubclass(kind, cls):
            raise InputError(f"The model in {path} was saved by {kind.__name__}, not {cls.__name__}.")
        model = kind(str(path), max_length=saved["max_length"], device=device)
        classes = None if saved["classes"] is None else np.array(saved["classes"])
        model.answers_ = Answers(saved.get("metric", ""), classes)
        model.columns_ = saved["columns"]
        model.network_ = model._load(str(path)).to(model._device)
        return model

    def other_settings(self, folder: Path, rows: Rows) -> str | None:
        """Return how the fit in a folder differs from a fit of this model to rows; ``None`` if nothing differs."""
        output = OutputFolder(folder, "fit", SETUP)
        saved = output.read()
        names = [name for name, value in self._setup(rows).items() if saved and saved.get(name) != value]
        difference = f"other settings ({', '.join(names).replace('_', ' ')})" if names else None
        return "other files" if output.has_other_files else difference

    @property
    def _seed(self) -> int:
        return whole_number("seed", self.seed, least=0)

    @property
    def _max_length(self) -> int | None:
        return None if self.max_length is None else whole_number("max_length", self.max_length, least=4)

    def _setup(self, rows: Rows) -> dict[str, Any]:
        model = str(self.model)
        setup = {"model": model, "model_files": checksum_if_there(model), "metric": rows.answers.metric}
        return {**setup, "seed": self._seed, "max_length": self._max_length, "rows": rows.content()}

    def _folds(self, folder: Path, rows: Rows) -> Path:
        """Create the folder for the logits of folds; refuse a folder that holds another fit."""
        if difference := self.other_settings(folder, rows):
            raise InputError(f"{folder} holds a fit with {difference}: give another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        OutputFolder(folder, "fit", SETUP).write(self._setup(rows))
        (folder / "folds").mkdir(exist_ok=True)
        return folder / "folds"

    def _dataset(self, texts: Sequence[tuple[str, ...]], labels: Sequence[Any]) -> Dataset:
        """Return texts with class numbers, or numbers, as rows of the task."""
        disable_progress_bars()
        columns = dict(zip(COLUMNS, map(list, zip(*texts, strict=True)), strict=False))
        names = self._kind.task.labels
        return Dataset.from_dict({**columns, "label": [names[number] for number in labels] if names else [*labels]})

    def _load(self, model: str) -> Any:
        """Load and return the pretrained model; set the kind of task that encodes its rows."""
        if adapter_base(model) is not None:
            advice = "merge it with its model (`merge_and_unload` of peft), and save that"
            raise InputError(f"Expected the folder of a whole model, got an adapter in {model}: {advice}.")
        self._device = choose_device(self.device)
        self._pools, columns = False, COLUMNS[: len(self.columns_)]
        task = replace(TASKS["custom"], columns=columns, kind="regression", metrics=OF_NUMBERS)
        if self.answers_.classes is not None:
            names = tuple(map(str, self.answers_.classes))
            task = replace(TASKS["custom"], columns=columns, labels=names, metrics=("accuracy",))
        loaded = load_pretrained(task, model)
        if saved_pooling(loaded.model.config) == "mean":  # which transformers alone does not compute
            loaded = load_pretrained(task, model, pooling="own")
            self._pools = pool_mean(loaded.model)
            if not self._pools:
                name = f"{type(loaded.model).__name__} of {model}"
                warnings.warn(f"The {name} cannot read the mean of its tokens, as in its training.", AttnRegWarning, 2)
        length = longest_input(loaded.model, self._max_length, task.max_length)
        self._kind = kind_class(task.kind)(task, loaded.tokenizer, length)
        return loaded.model.float()


class TextClassifier(ClassifierMixin, TextModel):
    """Train the best classifier of texts that a pretrained model gives within a time, and say what it will score.

    Linear probes and several ways of fine-tuning race over folds of the rows; the best is trained on all rows. The
    promised score, ``score_``, is corrected for the choice of the best.

    Args:
        model: folder or hub name of a pretrained model of transformers.
        budget: time to spend, such as ``"15m"`` or a number of seconds.
        metric: the score that chooses the best, ``"accuracy"`` (the default) or ``"macro_f1"``, with which all classes
            weigh the same in training, and so in probabilities.
        max_length: maximum tokens of a text; longer ones are cut (default: 128, or up to 512 where more than a fifth of
            the texts are cut, linear probes gain by more tokens, and there is time to read these).
        seed: seed of folds, new weights and the order of rows.
        device: ``"cpu"``, ``"cuda"`` or ``"mps"`` (default: the best available).
        folder: keeps the logits of folds, so that a stopped fit goes on there.
        verbose: whether to print progress and how much time is left.

    Attributes:
        classes_: the classes, sorted.
        score_: the score on new rows, as ``(score, low, high)`` with a 95 % interval.
        columns_: names of the texts of a row.
        best_: the chosen way of training.
        outcome_: all results of the race.

    Raises:
        InputError: if the rows are no texts, or their labels cannot be learned.

    Example:
        >>> import tempfile
        >>> from attnreg.experiments.tasks import get_task, load_model
        >>> folder = tempfile.TemporaryDirectory()
        >>> for part in load_model(get_task("agreement")):
        ...     _ = part.save_pretrained(folder.name)
        >>> texts = [f"the {noun} {verb}" for noun in ("boy", "girl") for verb in ("sleeps", "sleep", "sees", "see")]
        >>> classifier = TextClassifier(folder.name, budget="1s").fit(texts, [text.endswith("s") for text in texts])
        >>> classifier.predict_proba(["the boy laughs"]).shape
        (1, 2)
        >>> folder.cleanup()
    """

    _numbers = False

    @property
    def classes_(self) -> NDArray[Any]:
        """The classes, sorted."""
        check_is_fitted(self, "answers_")
        assert self.answers_.classes is not None
        return self.answers_.classes

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the probabilities of classes, ``(n, classes)``, calibrated on held-out rows."""
        return special.softmax(self.outputs(X), axis=1)

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the most probable class of every row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]


class TextRegressor(RegressorMixin, TextModel):
    """Train the best predictor of numbers from texts, such as ratings: as :class:`TextClassifier` for classes.

    ``metric`` is ``"pearson"`` (the default), Pearson's correlation of predictions and labels, or ``"spearman"``, the
    correlation of their ranks. The other arguments, and the attributes, are those of :class:`TextClassifier`.

    Example:
        >>> import tempfile
        >>> from attnreg.experiments.tasks import get_task, load_model
        >>> folder = tempfile.TemporaryDirectory()
        >>> for part in load_model(get_task("agreement")):
        ...     _ = part.save_pretrained(folder.name)
        >>> texts = [f"the {noun}" + " sees the girl" * more for noun in ("boy", "girl", "boys") for more in range(8)]
        >>> regressor = TextRegressor(folder.name, budget="1s").fit(texts, [len(text) / 7 for text in texts])
        >>> regressor.predict(["the boy laughs"]).shape
        (1,)
        >>> folder.cleanup()
    """

    _numbers = True

    def predict(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return a number per row, ``(n,)``."""
        return self.outputs(X)[:, 0]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """Return R², the share of the variance of labels that predictions explain, as regressors of scikit-learn do."""
        return float(super().score(X, y, sample_weight))
