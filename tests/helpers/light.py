"""What tests have no use for, and which takes longer than most of them, is left out; so is what a busy machine changes."""

import functools
import time
from types import SimpleNamespace

DEV_ROWS = 100


def with_few_dev_rows():
    """Make what the embedded task is scored on smaller: short runs of tests would spend most of their time on that."""
    from attnreg.experiments.tasks import agreement

    agreement.SIZES.update(validation=DEV_ROWS, test=DEV_ROWS)


def without_fingerprints():
    """Let ``datasets`` not hash each table that is made. It finds cached files by the hash, of which tests have none."""
    from datasets import arrow_dataset, fingerprint

    arrow_dataset.generate_fingerprint = lambda table: fingerprint.generate_random_fingerprint()
    for module in (arrow_dataset, fingerprint):
        module.update_fingerprint = lambda *given: fingerprint.generate_random_fingerprint()


COMPUTED = []  # how ``evaluate`` computes


def without_tables_of_metrics():
    """Let metrics be computed from the lists that they are given, which ``evaluate`` first writes into a table."""
    import evaluate

    def compute(metric, *, predictions, references):
        """Compute it; each metric adds to this text."""
        return metric._compute(predictions=predictions, references=references)

    if not COMPUTED:
        COMPUTED.append(evaluate.EvaluationModule.compute)
        evaluate.EvaluationModule.compute = compute


def without_deep_copies():
    """Let tables hand out their features as they are, instead of a deep copy at each look."""
    import datasets

    datasets.Features.copy = lambda features: datasets.Features(features)


def without_devices():
    """Let ``torch.manual_seed`` not queue, each with its stack, seeds for devices that are not there."""
    import torch

    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            for module in (device, getattr(device, "random", device)):
                module._lazy_call = lambda call, **options: None


DRAWN = []  # how runs draw


def without_pictures():
    """Let runs end without pictures, which take longer than most runs of tests."""
    from attnreg.experiments.runs.run import Run

    if not DRAWN:
        DRAWN.append(Run.pictures)
        Run.pictures = lambda run: []


def without_collections():
    """Let accelerate not look for garbage before each training, which takes longer than most trainings of tests."""
    from accelerate.utils import memory

    memory.gc = SimpleNamespace(collect=lambda: 0)


def with_one_commit():
    """Let git be asked once which commit a process runs."""
    from attnreg.experiments.results import outcome

    if not hasattr(outcome._commit, "cache_info"):
        outcome._commit = functools.cache(outcome._commit)


def with_budgets_of_one_core():
    """Let fits count the seconds of the processor, since a busy machine would change what they have time for."""
    from attnreg.experiments.fit.clock import Clock

    Clock.now = staticmethod(time.process_time)


SAMPLES = {}  # how many bootstrap samples of rows a fit draws


def with_fewer_samples():
    """Let races of a fit, which take most of their time for that, draw a part of their bootstrap samples."""
    from attnreg.experiments.fit import choice

    for function, part in ((choice.bias_corrected, 0.2), (choice.probability_best, 0.4)):
        usual = SAMPLES.setdefault(function, function.__kwdefaults__["resamples"])
        function.__kwdefaults__["resamples"] = round(part * usual)


def lighten():
    """Do all of it, in this process."""
    without_fingerprints()
    without_tables_of_metrics()
    without_deep_copies()
    without_devices()
    without_pictures()
    without_collections()
    with_one_commit()
    with_budgets_of_one_core()
    with_fewer_samples()
