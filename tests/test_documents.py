"""The README and the docs: their Python blocks run, their links lead somewhere, and the site of them builds."""

import gzip
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import attnreg
from tests import tables
from tests.families import NAMES
from tests.helpers.cases import MODELS, refusal, tiny_bert
from tests.helpers.commands import assert_sentence, invoke, ran
from tests.helpers.provider_cases import PROVIDERS
from tests.helpers.repository import ROOT, run_script, script_of
from tests.helpers.task_data import write_rows

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]  # the site, if it was built
BLOCKS = {page: re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S) for page in PAGES}
# Each by itself, one after the other; each page in a folder of its own. Writes down how each page ended.
RUN = """
import json, os, sys, traceback, warnings
from pathlib import Path

home, ends = Path.cwd(), {}
for page, blocks in json.loads(sys.argv[1]).items():
    folder = home / str(len(ends))
    folder.mkdir()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*pin_memory", UserWarning)  # of the Trainer on a CPU
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft's
            for block in blocks:
                exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})
        ends[page] = ["", sorted(os.listdir())]
    except Exception:
        ends[page] = [traceback.format_exc(), []]
(home / "ends.json").write_text(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends(warm, tmp_path_factory):
    """How each page ended, and what it left in its folder."""
    folder = tmp_path_factory.mktemp("pages")
    blocks = {str(page): found for page, found in BLOCKS.items() if found}
    code, output = warm.run("-c", RUN, json.dumps(blocks), cwd=folder, timeout=500)
    assert code == 0, output
    return json.loads((folder / "ends.json").read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(page, ends):
    error, left = ends[str(page)]
    assert not error, error
    assert set(left) <= {"runs"}  # the Trainer makes its output folder at once


def test_the_method_of_your_own_runs_as_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [text] = BLOCKS[ROOT / "docs/own-method.md"]
    Path("anchored.py").write_text(text)
    quick = ["--epochs", "1", "--train-size", "64"]
    ran(invoke("recipe", "anchored.py", "--strength", "0.1", *quick))
    assert json.loads(Path("runs/anchored-agreement-seed0/config.json").read_text())["own"] == {"strength": 0.1}
    Path("plain.py").write_text(text.replace("run.train(Anchored", "run.train(FineTuning"))
    says = r"Cannot make FineTuning for anchored: .* got an unexpected keyword argument 'strength'\."
    assert_sentence(invoke("recipe", "plain.py", "--output-dir", "plain", *quick), 1, says)


def test_the_trainer_script_runs(real_data, warm, tmp_path):
    for split in ("train", "validation"):
        with gzip.open(real_data / "rte" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(next(file)) for _ in range(64)]
        write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    tiny_bert([row["sentence1"] for row in rows], tmp_path / "model")
    args = [tmp_path / "data", tmp_path / "model", 2]
    output = run_script(warm, ROOT / "docs/trainer.md", "rte.py", *args, cwd=tmp_path)
    assert output.count("eval_accuracy") == 2


@pytest.mark.parametrize("tool", ["autorank", "deepsig"])
def test_other_tools_are_given_all_scores(tool, monkeypatch, capsys):
    given = []
    stub = SimpleNamespace(autorank=given.append, create_report=print, multi_aso=lambda scores, **_: given.append(scores) or np.ones(1))  # fmt: skip
    monkeypatch.setitem(sys.modules, tool, stub)
    monkeypatch.chdir(ROOT)
    exec(script_of(ROOT / "docs/results/mechanism/README.md", f"{tool}.py"), {})
    assert {name: len(scores) for name, scores in given[0].items()} == {"high": 24, "plain": 24, "random": 24}


def test_the_table_of_providers_and_families_is_whole():
    text = (ROOT / "docs/providers/families.md").read_text(encoding="utf-8")
    [families] = re.findall(r"^The families: (.*)\.$", text, re.M)
    [whole] = re.findall(r"^With all of them: (.*)\.$", text, re.M)
    partly = re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.M)
    cases = {*re.findall("`([^`]+)`", " ".join([whole, *(names for names, _ in partly)]))}
    named = [name.split()[0] for name in cases]
    tried = [case for case in PROVIDERS if case.outermost in (*tables.PAGE_OF, "Compose")]  # others lack a page first
    assert set(named) == {*tables.PAGE_OF, "Compose"} - {"CrossTuning"}, "run `python -m tests.families`"
    assert len(named) == len(tried), "run `python -m tests.families`"
    assert families == ", ".join(NAMES[case.name] for case in MODELS)
    shown = {(name, without) for names, without in partly for name in re.findall(r"`(\w+)", names)}
    refused = {case: [NAMES[m.name] for m in MODELS if refusal(m, case) is not None] for case in tried}
    assert shown == {(case.outermost, ", ".join(names)) for case, names in refused.items() if names}


@pytest.mark.parametrize("place", tables.PLACES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_of_providers_are_as_they_are_made(place):
    assert place.read_text(encoding="utf-8") == tables.renewed(place), "run `python -m tests.tables`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere_and_code_fits_its_box_on_the_site(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    blocks = re.findall(r"^```(\S*).*?\n(.*?)^```$", text, re.M | re.S)
    shown = [block for language, block in blocks if language in ("", "python", "yaml")]
    wide = [line for block in shown for line in block.splitlines() if len(line) > 85]
    assert not wide or "results" in page.parts or "benchmarks" in page.parts, wide


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


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "docs" / "gallery").glob("*.py")), ids=lambda path: path.stem)
def test_scripts_of_the_gallery_run(script, warm, tmp_path):
    """The site is built without running them, unless it is asked to."""
    code, output = warm.run(script, cwd=tmp_path, timeout=500)
    assert code == 0, output


@pytest.mark.slow
def test_the_site_needs_no_network(site):
    page = (site / "api" / "attnreg.DropHead.html").read_text(encoding="utf-8")
    assert (site / "_static" / "mathjax" / "tex-chtml.js").is_file()
    assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)="https?:', page)


@pytest.mark.slow
def test_every_public_name_has_a_page(site):
    names = {*attnreg.__all__} - {"experiments"}
    assert {f"attnreg.{name}" for name in names} <= {path.stem for path in (site / "api").glob("*.html")}


def test_pages_stay_short():
    """As CONTRIBUTING.md says."""
    docs = Path(__file__).parent.parent / "docs"
    pages = [page for folder in (docs, docs / "providers") for page in folder.glob("*.md")]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in pages}
    most = 14_800 + 200 * len([*docs.glob("providers/*.md")])  # 20,000 with the 26 pages of 0.2
    longest = ", ".join(f"{page.stem} {words[page]}" for page in sorted(pages, key=lambda each: -words[each])[:8])
    assert sum(words.values()) <= most, f"say once what pages say twice; the longest: {longest}"
    assert words[docs / "which.md"] <= 600
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700
