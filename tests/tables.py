"""The tables of providers in the README and the docs, made from the list of public names: ``python -m tests.tables``."""

from __future__ import annotations

import re
from pathlib import Path

from attnreg.provider.saving import built_in

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "providers"
BEGIN, END = "<!-- providers: made by python -m tests.tables -->", "<!-- end -->"


def page_of(name: str) -> Path:
    """The page with a heading that names the provider."""
    pages = (page for page in sorted(FOLDER.glob("*.md")) if re.search(rf"^#+ .*\b{name}\b", page.read_text(), re.M))
    return next(pages, FOLDER / "README.md")


def choose_if(name: str) -> str:
    """What the provider's page says after **Choose it if**."""
    text = page_of(name).read_text(encoding="utf-8")
    found = re.search(rf"\*\*Choose (?:it|`{name}`) if\*\* (.+?)\.\n", text, re.S)
    return " ".join(found[1].split()) if found else ""


def table(place: Path) -> str:
    """The rows, with links as seen from a file."""
    in_docs = place.parent == FOLDER
    rows = [["provider", "what it does", "choose it if"], ["---"] * 3]
    for name, cls in sorted(built_in().items(), key=lambda item: item[1].__module__.startswith("attnreg.provider.")):
        if name == "Compose":
            continue
        summary = (cls.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        link = page_of(name).name if in_docs else f"docs/providers/{page_of(name).name}"
        rows.append([f"[`{name}`]({link})", summary, choose_if(name)])
    return "\n".join("| " + " | ".join(row if in_docs else row[:2]) + " |" for row in rows)


def renewed(place: Path) -> str:
    """The text of a file with its table made anew."""
    text = place.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{table(place)}\n{END}{after}"


PLACES = (ROOT / "README.md", FOLDER / "README.md")

if __name__ == "__main__":
    for each in PLACES:
        each.write_text(renewed(each), encoding="utf-8")
