from attnreg.training.attacker_defender import AttackerDefender as AttackerDefender
from attnreg.training.fine_tuning import FineTuning as FineTuning
from attnreg.training.fine_tuning import TwoPass as TwoPass
from attnreg.training.method import StepResult as StepResult
from attnreg.training.method import TrainingMethod as TrainingMethod
from attnreg.training.mixout import Mixout as Mixout
from attnreg.training.optim import adamw as adamw
from attnreg.training.r_drop import RDrop as RDrop
