from attnreg.experiments.tasks.built_in import TASKS as TASKS
from attnreg.experiments.tasks.built_in import choose_task as choose_task
from attnreg.experiments.tasks.built_in import get_task as get_task
from attnreg.experiments.tasks.loading.data import load_data as load_data
from attnreg.experiments.tasks.metrics import METRICS as METRICS
from attnreg.experiments.tasks.models.pretrained import load_model as load_model
from attnreg.experiments.tasks.task import Task as Task
