"""The files of the repository: modules and what they import, scripts in pages."""

import ast
import functools
import re
from pathlib import Path

import attnreg
from attnreg._lazy import listed_names

ROOT = Path(__file__).parents[2]


def modules():
    """Every module of the package: its path by its name."""
    found = {}
    for path in sorted([*(ROOT / "attnreg").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith("attnreg.recipes"):  # a link to the folder above, in some checkouts
            found[f"attnreg.{name}" if name.startswith("recipes") else name] = path
    return found


MODULES = modules()
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
HOMES = {f"attnreg.{name}": module for name, module in listed_names(attnreg.__file__).items()}  # of public names


@functools.cache
def imports(name):
    """The modules that a file imports anywhere: at its top, late, or for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(TEXTS[name])):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else HOMES.get(whole, node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def script_of(page, name):
    return re.search(rf"^```python {name}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S).group(1)


def run_script(warm, page, name, *args, cwd, processes=1):
    script = script_of(page, name)
    assert len(script.splitlines()) < 45
    code, output = warm.run("-c", script, *args, cwd=cwd, timeout=1800, processes=processes)
    assert code == 0, output
    return output
