"""Each regularizer's page has its picture, formula, advice, code, command, figures and reference."""

import importlib
import inspect
import re

import pytest
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from tests import tables
from tests.helpers.cases import sample
from tests.helpers.provider_cases import BUILT_IN
from tests.helpers.repository import ROOT

NAMES = sorted({*BUILT_IN} - {"Compose", "OnLayers"})  # the overview has these two
PARTS = {
    "formula": r"^\$\$\n",
    "picture": r"!\[\w+\(.* in a training step[^\n]*\]\(\.\./_static/providers/",
    "code": r"^```python\n",
    "command": r"attnreg recipe ",
    "advice": r"^\*\*Choose (?:it|`\w+`) if\*\*",
    "alternative": r"^\*\*Choose another if\*\*",
    "figures": re.escape(tables.FIGURES),
    "reference": r"\*\*Source\.\*\*[^*]*\[arXiv\s\d{4}\.\d{5}\]\(https://arxiv\.org/abs/",
}


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        return importlib.import_module("pictures")


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=10, **sizes))


@pytest.mark.parametrize("name", NAMES)
def test_each_provider_has_a_page(name):
    wanted = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
    assert name in tables.PAGE_OF, f"write docs/providers/{wanted}.md, as CONTRIBUTING.md says"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_a_page_has_all_parts(page, pictures, model):
    assert page in tables.PAGE_OF.values()
    text = page.read_text(encoding="utf-8")
    missing = [part for part, pattern in PARTS.items() if not re.search(pattern, text, re.M)]
    assert not missing, f"{page.name} lacks {missing}: see CONTRIBUTING.md"
    drawn = [*pictures.IMAGE.finditer(text)]
    sizes = {
        path: path.stat().st_size if path.exists() else 0 for path in (page.parent / each["path"] for each in drawn)
    }
    assert all(0 < size < 30_000 for size in sizes.values()), f"run `python docs/pictures.py {page.stem}`: {sizes}"
    for expression in (*(found["text"] for found in drawn), *re.findall(r'--provider "([^"]+)"', text)):
        attnreg.parse_provider(expression, model, total_steps=10)


def formulas(text, begin):
    """Displayed formulas, in the notation of docstrings or pages, without spaces."""
    pattern = r"^\.\. math::((?:.*\n)(?:[ ]+.*\n|\n(?=[ ]))*)" if begin == ".. math::" else r"^\$\$\n(.+?)^\$\$"
    return ["".join(found.split()) for found in re.findall(pattern, text + "\n", re.M | (re.S if begin == "$$" else 0))]


@pytest.mark.parametrize("name", tables.PAGE_OF)
def test_the_page_has_the_formula_of_the_docstring_and_says_when_to_choose_it(name):
    shown = formulas(tables.PAGE_OF[name].read_text(encoding="utf-8"), "$$")
    assert all(each in shown for each in formulas(inspect.getdoc(BUILT_IN[name]), ".. math::"))
    assert tables.choose_if(name), "the page needs **Choose it if** ..."


def test_most_docstrings_have_a_formula():
    assert sum(bool(formulas(inspect.getdoc(BUILT_IN[name]), ".. math::")) for name in NAMES) >= 22


@pytest.mark.parametrize("text", sample(["LayerDrop(1.0) & HiddenKey(0.5)", "EmbeddingNoise()", "RelaxedAttention()"], lambda text: "&" in text))  # fmt: skip
def test_pictures_are_drawn(text, pictures, monkeypatch, tmp_path):
    monkeypatch.setattr(pictures, "STEPS", 1)
    pictures.small(pictures.drawn(text), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size < 30_000
