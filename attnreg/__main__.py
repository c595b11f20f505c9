"""``python -m attnreg``; with ``ATTNREG_CHILD`` in its environment, it ends when its parent process ends."""

import os
import sys
import threading

from attnreg.experiments.cli.main import main


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # the pipe closes when the parent ends, even if it is killed
    os._exit(1)


if os.environ.pop("ATTNREG_CHILD", None):
    threading.Thread(target=_end_with_parent, daemon=True).start()
main(prog_name="attnreg")
