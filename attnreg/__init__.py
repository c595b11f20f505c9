"""Attention regularizers for fine-tuning Transformers."""

# `__init__.pyi` lists the public names. A provider with a line there can be written in expressions, is listed by
# `attnreg list providers`, loaded by `from_pretrained`, tried by the tests and shown in the tables of the docs.

from attnreg._lazy import lazy_names

__version__ = "0.2.0"
__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
