"""Data sets: read and checked, from files, folders, the hub or the package."""
