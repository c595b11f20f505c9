"""``python -m attnreg``."""

from attnreg.cli.main import main

main(prog_name="attnreg")
