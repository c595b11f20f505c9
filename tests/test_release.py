"""What is released: dependencies that are used and explained, one version, project files that agree."""

import re
import sys
from importlib.metadata import packages_distributions

import pytest
import yaml

import attnreg
from tests.helpers.repository import MODULES, ROOT, imports

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: imported where they are needed, with a sentence if they are missing
OPTIONAL = {"peft", "optuna", "setfit", "sentence-transformers"}
BROUGHT = {"triton"}  # by torch, where it can run


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-")


REQUIRED = {name_of(each) for each in PROJECT["dependencies"]}


def imported():
    """Distributions that the package imports."""
    found = {module.partition(".")[0] for name in MODULES for module in imports(name)}
    distributions = packages_distributions()
    modules = found - sys.stdlib_module_names - {"attnreg", "recipes"}
    return {name_of(each) for module in modules for each in distributions.get(module, [module])}


def test_dependencies_are_those_that_are_imported():
    assert imported() - OPTIONAL - BROUGHT == REQUIRED


def test_each_dependency_has_a_reason():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| package \| why \|\n.*?\n\n", text, re.M | re.S)[0]
    first = {each.strip() for row in rows.splitlines()[2:] if row for each in row.split("|")[1].split(",")}
    assert first == REQUIRED


def test_nothing_is_installed_by_a_name_that_is_not_ours_yet():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "attnreg").rglob("*.py")]:
        assert not re.search(r"""pip install (?:-\S+ )*['"]?attnreg""", path.read_text(encoding="utf-8")), path


def test_there_is_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert attnreg.__version__ == PROJECT["version"] == citation["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_workflows_run_what_exists():
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert set(workflows) == {"tests", "docs", "release"}
    tested = workflows["tests"]["jobs"]["tests"]
    named = [f"Programming Language :: Python :: {each}" for each in tested["strategy"]["matrix"]["python"]]
    assert [each for each in PROJECT["classifiers"] if re.search(r"3\.\d", each)] == named
    assert {"run": ".ci/run"}.items() <= tested["steps"][2].items()
