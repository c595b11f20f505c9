"""Model types in which positions see each other by other ways than attention: what masks drop still comes through these."""

from __future__ import annotations

OTHER_WAYS: dict[str, str] = {}
