from attnreg.experiments.tasks.data import load_data as load_data
from attnreg.experiments.tasks.data import load_splits as load_splits
from attnreg.experiments.tasks.definition import Task as Task
from attnreg.experiments.tasks.metrics import METRICS as METRICS
from attnreg.experiments.tasks.model import load_model as load_model
from attnreg.experiments.tasks.task import TASKS as TASKS
from attnreg.experiments.tasks.task import choose_task as choose_task
from attnreg.experiments.tasks.task import get_task as get_task
