"""Training methods, the library's own loop, runs and their folders."""

from typing import TYPE_CHECKING

from attnreg._lazy import lazy_names

_NAMES = {
    "AttackerDefender": "attnreg.training.attacker_defender",
    "FineTuning": "attnreg.training.fine_tuning",
    "Run": "attnreg.training.run",
    "StepResult": "attnreg.training.method",
    "TrainingMethod": "attnreg.training.method",
    "adamw": "attnreg.training.optim",
    "evaluate": "attnreg.training.evaluation",
    "fit": "attnreg.training.loop",
    "recipe": "attnreg.training.command",
    "report": "attnreg.training.reporting",
}
__all__ = list(_NAMES)  # noqa: PLE0604
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

if TYPE_CHECKING:
    from attnreg.training.attacker_defender import AttackerDefender
    from attnreg.training.evaluation import evaluate
    from attnreg.training.fine_tuning import FineTuning
    from attnreg.training.loop import fit
    from attnreg.training.method import StepResult, TrainingMethod
    from attnreg.training.optim import adamw
    from attnreg.training.command import recipe
    from attnreg.training.reporting import report
    from attnreg.training.run import Run
