"""What messages and pages say about each other: pages that messages name exist, and quoted messages are in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def texts():
    """All texts of the package; values that are filled in are an ellipsis."""
    for path in [*(ROOT / "attnreg").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
            if " " in text or "/" in text:
                yield text


ALL = list(texts())


def test_pages_that_messages_name_exist():
    named = {page for text in ALL for page in re.findall(r"\bdocs/[\w/-]+(?:\.md)?", text)}
    assert len(ALL) > 1000
    assert not [page for page in named if not (ROOT / page).exists()]


def quotes():
    text = (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8")
    return re.findall(r'^\| "([^"|]+)"', text, re.M)


@pytest.mark.parametrize("quote", quotes())
def test_quoted_messages_are_in_the_code(quote):
    pieces = [piece.strip() for piece in quote.replace("`", "").split("…") if len(piece.strip()) > 7]
    clean = [text.replace("`", "") for text in ALL]
    assert pieces, quote
    assert any(all(piece in text for piece in pieces) for text in clean), quote
