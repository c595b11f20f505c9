"""A classifier of texts in the way of scikit-learn: the best of several ways to train a model on its rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, disable_progress_bars
from numpy.typing import NDArray
from scipy import special
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from attnreg._files import replaced_folder, write_text
from attnreg.errors import AttnRegWarning, InputError
from attnreg.experiments.fit.clock import Clock, seconds_of
from attnreg.experiments.fit.race import Outcome, Race
from attnreg.experiments.fit.rows import COLUMNS, Rows, texts_in
from attnreg.experiments.fit.tries import Bench
from attnreg.experiments.results.evaluation import predict
from attnreg.experiments.setup.batches import to_score
from attnreg.experiments.setup.device import choose_device
from attnreg.experiments.setup.rows import input_warnings, label_warnings
from attnreg.experiments.tasks.built_in import TASKS
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import Kind
from attnreg.experiments.tasks.models.mean_layer import pool_mean, with_mean_layer
from attnreg.experiments.tasks.models.pooling import saved_pooling
from attnreg.experiments.tasks.models.pretrained import load_pretrained, longest_input

METRICS = ("accuracy", "macro_f1")
_CLASSES, _TEMPERATURE, _LENGTH = "attnreg_classes", "attnreg_temperature", "attnreg_max_length"  # in config.json
_UNKNOWN = 1 / 2  # of a text's tokens
SETUP = "fit.json"  # of `attnreg fit`, in its folder
_FEW = 1000  # rows, below which batches are smaller


class TextClassifier(ClassifierMixin, BaseEstimator):
    """Train the best classifier of texts that a pretrained model gives within a time, and say what it will score.

    Linear probes and several ways of fine-tuning race over folds of the rows; the best is trained on all rows. The
    score that is promised, ``score_``, is corrected for having chosen the best.

    Args:
        model: folder or hub name of a pretrained model of transformers.
        budget: time to spend, such as ``"15m"`` or a number of seconds.
        metric: what the best is chosen by, ``"accuracy"`` or ``"macro_f1"``.
        max_length: maximum tokens of a text; longer ones are cut.
        seed: seed of folds, new weights and the order of rows.
        device: ``"cpu"``, ``"cuda"`` or ``"mps"`` (default: the best available).
        folder: keeps what was trained on folds, so that the fit goes on there after it was stopped.
        verbose: whether to print what is done and how much time is left.

    Attributes:
        classes_: the classes, sorted.
        score_: the score on new rows, as ``(score, low, high)`` with a 95 % interval.
        best_: the chosen way of training.
        outcome_: all that was found.

    Raises:
        InputError: if the rows are no texts, or there is nothing to learn from them.

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

    network_: Any
    outcome_: Outcome
    _kind: Kind
    _device: torch.device

    def __init__(
        self,
        model: str | Path = "sentence-transformers/all-MiniLM-L6-v2",
        *,
        budget: str | float = "15m",
        metric: str = "accuracy",
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

    def fit(self, X: Any, y: Any, groups: Any = None) -> TextClassifier:  # noqa: N803 (scikit-learn's name)
        """Fit to texts, or pairs of texts, and their labels; rows of one of the ``groups`` are in one fold."""
        seconds = seconds_of(self.budget)
        if self.metric not in METRICS:
            raise InputError(f"Expected `metric` to be one of {', '.join(METRICS)}, got {self.metric!r}.")
        rows = Rows.checked(X, y, groups)
        say: Callable[[str], None] = print if self.verbose else lambda text: None
        clock, folder = Clock(seconds, say), None if self.folder is None else Path(self.folder)
        self.classes_ = rows.classes
        with torch.random.fork_rng(), _same_threads():
            torch.manual_seed(self.seed)
            self._load(len(rows.texts[0]), str(self.model))
            given = rows.dataset(self._kind.task.labels)
            for each in (*label_warnings(self._kind, given), *input_warnings(self._kind, given, "texts")):
                warnings.warn(each, AttnRegWarning, stacklevel=2)
            size, accelerator = 16 if len(rows) < _FEW else 32, Accelerator(cpu=self._device.type == "cpu")
            bench = Bench(self.network_, self._kind, self._kind.encode(given), size, accelerator, self.seed)
            if folder is not None:
                _check_folder(folder, f"{rows.content()} {self.model} {self._kind.max_length} {self.seed}")
            race = Race(bench, rows, clock, self.metric, self.seed, folder)
            self.outcome_ = race.run()
            self.network_ = race.final(self.outcome_.best)
            if self._pools:
                self.network_ = with_mean_layer(self.network_)
        self.best_, self.score_ = str(self.outcome_.best), tuple(self.outcome_.estimate)
        self.temperature_ = self.outcome_.temperature
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the probability of each class, ``(n, classes)``, calibrated on rows held out."""
        check_is_fitted(self, "network_")
        texts = texts_in(X)
        if not texts:
            return np.empty((0, len(self.classes_)))
        if len(texts[0]) != len(self._kind.task.columns):
            raise InputError(f"Expected {len(self._kind.task.columns)} texts in each row, got {len(texts[0])}.")
        columns = dict(zip(COLUMNS, map(list, zip(*texts, strict=True)), strict=False))
        rows = Dataset.from_dict({**columns, "label": [self._kind.task.labels[0]] * len(texts)})
        labelled = to_score(self._kind.encode(rows), 64, self._kind, self._device)
        records = predict(self.network_, labelled, self._kind).records
        return special.softmax(np.array([each["logits"] for each in records]) / self.temperature_, axis=1)

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the most probable class of each row."""
        best = self.predict_proba(X).argmax(1)  # before the classes, which a classifier that is not fitted lacks
        return self.classes_[best]

    def doubt(self, texts: Sequence[str]) -> str:
        """Return why the text or texts of a row cannot be judged, or only in part; empty if they can."""
        if not any(text.strip() for text in texts):
            return "no text"
        tokenizer = self._kind.tokenizer
        ids = tokenizer(*texts, add_special_tokens=True)["input_ids"]
        unknown = sum(each == tokenizer.unk_token_id for each in ids)
        if unknown > _UNKNOWN * max(1, len(ids) - tokenizer.num_special_tokens_to_add(len(texts) > 1)):
            return "most of it is unknown to the tokenizer"
        return f"cut at {self._kind.max_length} tokens" if len(ids) > self._kind.max_length else ""

    def save(self, folder: str | Path) -> None:
        """Write the model to a folder, as transformers loads it; :meth:`load` reads it."""
        check_is_fitted(self, "network_")
        config = self.network_.config
        setattr(config, _CLASSES, self.classes_.tolist())
        setattr(config, _TEMPERATURE, self.temperature_)
        setattr(config, _LENGTH, [self._kind.max_length, len(self._kind.task.columns)])
        with replaced_folder(Path(folder)) as new:
            self.network_.save_pretrained(new)
            self._kind.tokenizer.save_pretrained(new)

    @classmethod
    def load(cls, folder: str | Path, device: str | None = None) -> TextClassifier:
        """Load what :meth:`save` has written."""
        import transformers

        place = Path(folder) / "model" if (Path(folder) / "model").is_dir() else Path(folder)
        if (place / SETUP).is_file():
            raise InputError(f"The fit in {folder} has not finished: repeat its `attnreg fit` command to continue it.")
        try:
            config = transformers.AutoConfig.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise InputError(f"No model in {place}: {error}") from error
        if not hasattr(config, _CLASSES):
            raise InputError(f"The model in {place} was not made by `attnreg fit`: use `attnreg evaluate`.")
        length, texts = getattr(config, _LENGTH)
        made = cls(str(place), max_length=length, device=device)
        made.classes_ = np.array(getattr(config, _CLASSES))
        made.temperature_ = getattr(config, _TEMPERATURE)
        made._load(texts, str(place))
        made.network_.to(made._device)
        return made

    def _load(self, texts: int, model: str) -> None:
        """Load the pretrained model, and the kind that encodes its rows."""
        disable_progress_bars()
        self._device = choose_device(self.device)  # and no accelerator, whose state cannot always be pickled
        self._pools, names = False, tuple(map(str, self.classes_))
        task = replace(TASKS["custom"], columns=COLUMNS[:texts], labels=names, metrics=("accuracy",))
        loaded = load_pretrained(task, model)
        if saved_pooling(loaded.model.config) == "mean":  # which transformers alone would not compute
            loaded = load_pretrained(task, model, pooling="own")
            self._pools = pool_mean(loaded.model)
            if not self._pools:
                what = f"{type(loaded.model).__name__} of {model}"
                warnings.warn(
                    f"The {what} cannot read the mean of its tokens, for which it was made.", AttnRegWarning, 2
                )
        length = longest_input(loaded.model, self.max_length, task.max_length)
        self.network_ = loaded.model.float()
        self._kind = kind_class(task.kind)(task, loaded.tokenizer, length)


@contextmanager
def _same_threads() -> Iterator[None]:
    """Restore the number of threads of torch, which a fit chooses."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_folder(folder: Path, content: str) -> None:
    """Refuse a folder that keeps what was trained on other rows, with another model or seed."""
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "content"
    if known.is_file() and known.read_text(encoding="utf-8") != content:
        raise InputError(f"{folder} keeps a fit of other rows, or with another model, length or seed: give another.")
    write_text(known, content)
