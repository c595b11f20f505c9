from attnreg.experiments import tasks as tasks
from attnreg.experiments.runs.command import provider_option as provider_option
from attnreg.experiments.runs.command import recipe as recipe
from attnreg.experiments.runs.evaluation import evaluate as evaluate
from attnreg.experiments.runs.history import History as History
from attnreg.experiments.runs.options import argument as argument
from attnreg.experiments.runs.options import option as option
from attnreg.experiments.runs.run import Run as Run
