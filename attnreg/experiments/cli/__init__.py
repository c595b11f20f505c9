"""The commands of ``attnreg``, one file each."""
