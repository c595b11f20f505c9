"""Training methods, the library's own loop, runs and their folders."""

from typing import TYPE_CHECKING

from attnreg._lazy import lazy_names

_NAMES = {
    "AttackerDefender": "attnreg.training.attacker_defender",
    "FineTuning": "attnreg.training.fine_tuning",
    "History": "attnreg.training.loop",
    "Mixout": "attnreg.training.mixout",
    "RDrop": "attnreg.training.r_drop",
    "Run": "attnreg.training.run",
    "StepResult": "attnreg.training.method",
    "TrainingMethod": "attnreg.training.method",
    "TwoPass": "attnreg.training.two_pass",
    "adamw": "attnreg.training.optim",
    "evaluate": "attnreg.training.evaluation",
    "fit": "attnreg.training.loop",
    "parse_grid": "attnreg.training.grid_search",
    "provider_option": "attnreg.training.command",
    "recipe": "attnreg.training.command",
    "report": "attnreg.training.reporting",
    "search": "attnreg.training.grid_search",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

if TYPE_CHECKING:
    from attnreg.training.attacker_defender import AttackerDefender as AttackerDefender
    from attnreg.training.command import provider_option as provider_option
    from attnreg.training.command import recipe as recipe
    from attnreg.training.evaluation import evaluate as evaluate
    from attnreg.training.fine_tuning import FineTuning as FineTuning
    from attnreg.training.grid_search import parse_grid as parse_grid
    from attnreg.training.grid_search import search as search
    from attnreg.training.loop import History as History
    from attnreg.training.loop import fit as fit
    from attnreg.training.method import StepResult as StepResult
    from attnreg.training.method import TrainingMethod as TrainingMethod
    from attnreg.training.mixout import Mixout as Mixout
    from attnreg.training.optim import adamw as adamw
    from attnreg.training.r_drop import RDrop as RDrop
    from attnreg.training.reporting import report as report
    from attnreg.training.run import Run as Run
    from attnreg.training.two_pass import TwoPass as TwoPass
