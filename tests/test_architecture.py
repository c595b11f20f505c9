"""The shape of the project: imports point one way, files stay small, packages and lists are complete."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import attnreg

ROOT = Path(__file__).parent.parent
# Each layer may import those before it.
LAYERS = [
    {"errors", "_lazy", "_files"},
    {"masks", "functional"},
    {"provider"},
    {"injection"},
    {"attribution"},
    {"providers"},
    {"pretrained"},
    {"expression"},
    {"tasks"},
    {"training"},
    {"integrations"},
    {"plots"},
    {"compare"},
    {"recipes"},
    {"cli"},
]
SOURCES = sorted([*(ROOT / "attnreg").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])


def layer_of(module):
    parts = module.split(".")
    name = parts[1] if parts[0] == "attnreg" and len(parts) > 1 else parts[0]
    return next((i for i, names in enumerate(LAYERS) if name in names), None)


def imported_when_loaded(tree):
    """Modules that a file imports at its top level, outside TYPE_CHECKING."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                [node.module] if node.module != "attnreg" else [f"attnreg.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own is None:
        return  # the façades: attnreg/__init__.py, attnreg/__main__.py
    for module in imported_when_loaded(ast.parse(path.read_text(encoding="utf-8"))):
        theirs = layer_of(module) if module.startswith("attnreg") else None
        assert theirs is None or theirs <= own, f"{path.name} imports {module}"


def test_all_sources_are_looked_at():
    assert len(SOURCES) > 50
    assert all(layer_of(f"attnreg.{p.stem}") is not None for p in (ROOT / "attnreg").iterdir() if p.is_dir() and (p / "__init__.py").is_file())  # fmt: skip


def test_files_stay_small():
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES)
    assert lengths[-1] <= 400
    assert lengths[len(lengths) // 2] < 150
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 250 for path in (ROOT / "recipes").glob("*.py"))


def test_every_package_is_shipped():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.findall(
        r'^  "([\w.]+)",$', text[text.index("packages = [") : text.index("]", text.index("packages = ["))], re.M
    )
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "attnreg").rglob("__init__.py")}
    assert set(packages) == found | {"attnreg.recipes"}


@pytest.mark.parametrize(
    "package", ["attnreg", "attnreg.training", "attnreg.experiments.tasks", "attnreg.integrations"]
)
def test_lazy_names_are_all_there(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == dir(module)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_every_provider_has_its_page_and_its_lines():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "providers").glob("*.md"))
    from attnreg import providers

    for name in providers.__all__:
        assert hasattr(attnreg, name)
        assert name in pages or name == "Compose"
        assert name in (ROOT / "CHANGELOG.md").read_text()
