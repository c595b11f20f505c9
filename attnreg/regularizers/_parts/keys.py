"""Regularizers that decide once for all queries of a sample."""

from __future__ import annotations

from collections.abc import Sequence

from attnreg.errors import InputError
from attnreg.sites import SiteInfo


def check_shared_keys(does: str, sites: Sequence[SiteInfo], *, in_parts: bool = False) -> None:
    """Raise if queries do not share their keys.

    Args:
        does: what needs shared keys, for the message: "DropHead drops heads of whole samples".
        sites: the sites.
        in_parts: whether attention in parts may have other keys in each part.

    Raises:
        InputError: if one has its own keys for each query, or each part of it.

    Example:
        >>> check_shared_keys("TokenDropout drops tokens for all queries", [SiteInfo(name="local", shares_keys=False)])
        Traceback (most recent call last):
            ...
        attnreg.errors.InputError: TokenDropout drops tokens for all queries, but at local each query has its own...
    """
    for site in sites:
        if not site.shares_keys and not (in_parts and site.in_parts):
            raise InputError(
                f"{does}, but at {site.name} each {'part' if site.in_parts else 'query'} has its own keys: choose "
                "other attention with `modules=...`."
            )
