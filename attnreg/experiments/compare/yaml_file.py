"""Read study files and search spaces, which people write as YAML."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from attnreg.errors import InputError, did_you_mean, one_line


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, of which YAML would keep the last value."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (name := key.value.replace("-", "_")) in seen and name != "<<":
                raise InputError(f"the key {key.value!r} is there twice, again in line {key.start_mark.line + 1}")
            seen.add(name)
        return node


def load_yaml(source: Path | str, title: str) -> Any:
    """Read YAML from a file, or from a text."""
    try:
        return yaml.load(source.read_text(encoding="utf-8") if isinstance(source, Path) else source, _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"Cannot read {title}: {one_line(error)}") from error


def mapping(content: Any, title: str, known: Collection[str] | None = None) -> dict[str, Any]:
    """Return a copy of a mapping; known keys may be written with dashes. An empty value has no keys."""
    if content is not None and not isinstance(content, dict):
        raise InputError(f"Expected {title} to map names to values, got {content!r}.")
    by_name = {str(key): value for key, value in (content or {}).items()}
    if known is None:
        return by_name
    for key in by_name:
        if key.replace("-", "_") not in known:
            raise InputError(f"Unknown key {key!r} in {title}.{did_you_mean(key, known)}")
    return {key.replace("-", "_"): value for key, value in by_name.items()}


def check_switches(options: Mapping[str, Any], switches: Collection[str], title: str) -> None:
    """Raise if an option that is no switch is true or false, as which YAML reads ``yes`` and ``no``."""
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, bool) and name not in switches:
                raise InputError(
                    f"Expected {name} in {title} as a number or text, got {item}, as YAML reads yes, no, on and off: "
                    "write a number, or put the word in quotes."
                )
