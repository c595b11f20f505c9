"""The shape of the project: imports point one way, files stay small, lists are complete."""

import ast
import importlib
import re
import statistics
import subprocess
import sys

import pytest

import attnreg
from attnreg.regularizer.saving import built_in
from tests.helpers.repository import MODULES, ROOT, TEXTS, imports

# Each room may import from itself and from those before it; "injection" and its like hold folders of their own.
LIBRARY = [
    *("attnreg.errors", "attnreg.arguments", "attnreg._lazy", "attnreg._files"),
    "attnreg",  # which names all others and imports none
    *(
        "attnreg.kernels",
        "attnreg.outputs",
        "attnreg.sharding",
        "attnreg.functional",
        "attnreg.draws",
        "attnreg.masks",
        "attnreg.sites",
    ),
    *("attnreg.regularizer", "attnreg.injection.backends", "attnreg.injection.discovery", "attnreg.injection.running"),
    *("attnreg.injection", "attnreg.attribution", "attnreg.regularizers", "attnreg.training", "attnreg.diagnosis"),
    *("attnreg.attendout", "attnreg.integrations", "attnreg.deprecated"),
]
ROOMS = [
    *LIBRARY,
    *(f"attnreg.experiments.{name}" for name in ("tasks", "options", "folder", "setup", "results", "runs")),
    *(
        "attnreg.experiments",
        "attnreg.recipes",
        "attnreg.experiments.compare",
        "attnreg.experiments.fit",
        "attnreg.experiments.cli",
    ),
    "attnreg.__main__",
]
# What the library half may import, besides the standard library, and what it may not.
NEEDED = {"torch", "transformers", "accelerate", "captum", "safetensors", "numpy", "typing_extensions"}
NEED_TRITON = "attnreg.kernels.device."  # which torch brings along where it can run
OTHERS = ["click", "datasets", "evaluate", "markdown_it", "matplotlib", "peft", "rich", "sacrebleu", "seqeval", "sklearn"]  # fmt: skip


def room_of(module):
    parents = [module.rsplit(".", depth)[0] for depth in range(module.count(".") + 1)]
    return next((name for name in parents if name in ROOMS), None) if module != "attnreg" else "attnreg"


def test_every_module_has_a_room():
    assert len(MODULES) > 150
    strays = [name for name in MODULES if room_of(name) in (None, "attnreg") and name != "attnreg"]
    assert not strays, "add its room to ROOMS"


def test_imports_point_one_way():
    for name, module in ((importer, each) for importer in MODULES for each in imports(importer)):
        if module in MODULES:
            assert ROOMS.index(room_of(module)) <= ROOMS.index(room_of(name)), f"{name} imports {module}"
        elif room_of(name) in LIBRARY:
            root = module.partition(".")[0]
            needed = NEEDED | {"triton"} if name.startswith(NEED_TRITON) else NEEDED
            assert root in needed or root in sys.stdlib_module_names, f"{name} imports {module}"


def test_no_test_module_imports_another():
    files = [*(ROOT / "tests").rglob("*.py")]
    assert len(files) > 150
    for path in files:
        assert not re.search(
            r"(from|import) tests\.[\w.]*\btest_|from tests[\w.]* import .*\btest_", path.read_text()
        ), path


def test_there_are_no_circles():
    edges = {name: {module for module in imports(name) if module in MODULES and module != name} for name in MODULES}
    while leaves := [name for name in edges if not edges[name] & edges.keys()]:
        for name in leaves:
            del edges[name]
    assert not edges


@pytest.mark.slow  # what each file imports is checked above
def test_the_library_half_needs_nothing_of_the_other():
    library = [name for name in MODULES if room_of(name) in LIBRARY and not name.startswith(NEED_TRITON)]
    code = (
        f"import sys, importlib\nfor name in {OTHERS}: sys.modules[name] = None\n"
        f"for name in {library}: importlib.import_module(name)\n"
        "assert not [name for name in sys.modules if name.startswith('attnreg.experiments')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_training_opens_no_file_and_parses_no_option():
    for name in (name for name in MODULES if name.startswith("attnreg.training")):
        roots = {module.partition(".")[0] for module in imports(name)}
        assert not roots & {"click", "json", "os", "pathlib", "shutil"}, name
        assert "open(" not in TEXTS[name], name


def test_each_folder_says_what_belongs_there():
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            assert (ast.get_docstring(ast.parse(TEXTS[name])) or "").partition("\n")[0].endswith("."), name


def test_files_stay_small():
    lengths = {name: len(text.splitlines()) for name, text in TEXTS.items()}
    assert max(lengths.values()) <= 400
    assert statistics.median(lengths.values()) < 150
    assert all(length <= 250 for name, length in lengths.items() if name.startswith("attnreg.recipes"))


def test_every_package_is_shipped():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    begin = text.index("packages = [")
    packages = re.findall(r'^  "([\w.]+)",$', text[begin : text.index("]", begin)], re.M)
    found = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(packages) == found


@pytest.mark.parametrize("package", ["attnreg", "attnreg.training", "attnreg.integrations", "attnreg.experiments", "attnreg.experiments.tasks"])  # fmt: skip
def test_public_names_are_all_there(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == dir(module)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_every_provider_is_public():
    files = {f"attnreg.regularizers.{path.stem}" for path in (ROOT / "attnreg" / "regularizers").glob("[a-z]*.py")}
    assert files == {cls.__module__ for cls in built_in().values() if "regularizers" in cls.__module__}
    assert all(hasattr(attnreg, name) for name in built_in())
