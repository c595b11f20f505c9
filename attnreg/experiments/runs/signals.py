"""Signals that stop a run, or the runs of a comparison, when there is something to save first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interruptible() -> Iterator[list[signal.Signals]]:
    """Collect the first SIGINT and the first SIGTERM within the block; the second of each acts as usual.

    A signal that is ignored stays ignored. Outside the main thread, where Python handles no signals, nothing changes.
    """
    seen: list[signal.Signals] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(signal.Signals(number))
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # None means that the handler was not installed from Python, so it could not be restored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, note)
    try:
        yield seen
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
