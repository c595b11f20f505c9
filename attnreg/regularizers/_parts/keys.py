"""Regularizers that decide once for all queries of a sample."""

from __future__ import annotations

from collections.abc import Sequence

from attnreg.errors import InputError
from attnreg.sites import SiteInfo


def check_shared_keys(does: str, sites: Sequence[SiteInfo], *, in_parts: bool = False) -> None:
    """Raise if queries do not share their keys; parts of an attention need not with ``in_parts``."""
    for site in sites:
        if not site.shares_keys and not (in_parts and site.in_parts):
            raise InputError(
                f"{does}, but at {site.name} each {'part' if site.in_parts else 'query'} has its own keys: choose "
                "other attention with `modules=...`."
            )
