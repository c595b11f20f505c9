"""Data sets, their metrics, and the task and model that come with the package."""

from typing import TYPE_CHECKING

from attnreg._lazy import lazy_names

_NAMES = {
    "METRICS": "attnreg.tasks.metrics",
    "TASKS": "attnreg.tasks.task",
    "Task": "attnreg.tasks.task",
    "get_task": "attnreg.tasks.task",
    "load_splits": "attnreg.tasks.data",
    "load_model": "attnreg.tasks.model",
}
__all__ = list(_NAMES)  # noqa: PLE0604
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

if TYPE_CHECKING:
    from attnreg.tasks.data import load_splits
    from attnreg.tasks.metrics import METRICS
    from attnreg.tasks.model import load_model
    from attnreg.tasks.task import TASKS, Task, get_task
