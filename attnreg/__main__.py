"""``python -m attnreg``."""

from attnreg.experiments.cli.main import main

main(prog_name="attnreg")
