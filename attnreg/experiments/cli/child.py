"""``python -m attnreg.experiments.cli.child``: like ``python -m attnreg``, but it ends when its parent process ends."""

from __future__ import annotations

import os
import sys
import threading

from attnreg.experiments.cli.main import main


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # the pipe closes when the parent ends, even if it is killed
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(prog_name="attnreg")
