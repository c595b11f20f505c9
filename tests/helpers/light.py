"""What tests have no use for, and which takes longer than most of them, is left out."""

from types import SimpleNamespace

DEV_ROWS = 200


def with_few_dev_rows():
    """Make the embedded task's dev set smaller: the short runs of tests would spend most of their time on scoring it."""
    from attnreg.experiments.tasks import agreement

    agreement.SIZES["validation"] = DEV_ROWS


def without_fingerprints():
    """Let ``datasets`` not hash each table that is made. It finds cached files by the hash, of which tests have none."""
    from datasets import arrow_dataset, fingerprint

    arrow_dataset.generate_fingerprint = lambda table: fingerprint.generate_random_fingerprint()


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


def lighten():
    """Leave all of it out, in this process."""
    without_fingerprints()
    without_devices()
    without_pictures()
    without_collections()
