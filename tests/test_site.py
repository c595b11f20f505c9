"""The documentation site builds without a warning, and its search finds what readers look for."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTENSIONS = ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "sphinx_design", "sphinx_gallery")
MISSING = [name for name in EXTENSIONS if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


def found(site, query):
    """Pages with all words of a query, as the site's own search finds them."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    pages = set(range(len(index["docnames"])))
    english = importlib.import_module("sphinx.search.en").SearchEnglish({})
    words = [english.stem(word) for word in re.findall(r"[a-z]+", query.lower()) if word not in english.stopwords]
    for word in words:
        hits = [index[part].get(word, []) for part in ("terms", "titleterms")]
        pages &= {page for hit in hits for page in (hit if isinstance(hit, list) else [hit])}
    return {index["docnames"][page] for page in pages}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("AD-DROP", "providers/attribution"),
        ("drop rate", "symptoms"),
        ("NoAttentionError", "symptoms"),
        ("LoRA", "trainer"),
        ("LoRA", "lora"),
        ("resume", "resuming"),
        ("Jupyter", "notebook"),
        ("write a training method", "own-method"),
        ("csv", "tasks"),
        ("SLURM", "cluster"),
    ],
)
def test_search_finds(site, query, page):
    assert page in found(site, query)


@pytest.mark.slow
def test_the_site_needs_no_network(site):
    page = (site / "api" / "attnreg.DropHead.html").read_text(encoding="utf-8")
    assert (site / "_static" / "mathjax" / "tex-chtml.js").is_file()
    assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)="https?:', page)


@pytest.mark.slow
def test_every_public_name_has_a_page(site):
    import attnreg

    pages = {path.stem for path in (site / "api").glob("*.html")}
    names = {f"attnreg.{name}" for name in attnreg.__all__} - {"attnreg.experiments"}
    assert names <= pages
