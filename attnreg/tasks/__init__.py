"""Data sets, their metrics, and the task and model that come with the package."""

from typing import TYPE_CHECKING

from attnreg._lazy import lazy_names

_NAMES = {
    "METRICS": "attnreg.tasks.metrics",
    "TASKS": "attnreg.tasks.task",
    "Task": "attnreg.tasks.definition",
    "choose_task": "attnreg.tasks.task",
    "get_task": "attnreg.tasks.task",
    "load_data": "attnreg.tasks.data",
    "load_splits": "attnreg.tasks.data",
    "load_model": "attnreg.tasks.model",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

if TYPE_CHECKING:
    from attnreg.tasks.data import load_data as load_data
    from attnreg.tasks.data import load_splits as load_splits
    from attnreg.tasks.definition import Task as Task
    from attnreg.tasks.metrics import METRICS as METRICS
    from attnreg.tasks.model import load_model as load_model
    from attnreg.tasks.task import TASKS as TASKS
    from attnreg.tasks.task import choose_task as choose_task
    from attnreg.tasks.task import get_task as get_task
