"""The commands of ``attnreg``."""
