"""The documentation site: ``sphinx-build -W docs docs/_build``; with ``-D plot_gallery=1`` its scripts run, too."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import tomllib
from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent.parent))

import attnreg
from attnreg._lazy import listed_names

with Path(__file__).parent.parent.joinpath("pyproject.toml").open("rb") as file:
    PROJECT = tomllib.load(file)["project"]
project, author = "attnreg", "The attnreg developers"
project_copyright = author
version = release = attnreg.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
root_doc = "index"
exclude_patterns = [
    "_build",
    "gallery",
    "Thumbs.db",
    "README.md",
]  # index.md takes its place here
templates_path = ["_templates"]

# Pages. A link to a heading or to a page that is not there is a warning, and -W makes it an error.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath", "html_image"]
nitpicky = True
# Types of other libraries, and internal ones, have no page.
nitpick_ignore_regex = [
    (
        "py:class",
        r"(?!attnreg\.([A-Z]|functional\.\w+$|training\.[A-Z]|integrations\.[A-Z])).*",
    )
]

# Reference. The stubs list the public names; their modules group them.
GROUPS = {
    "Fit a classifier": ("attnreg.experiments.",),
    "Attach": ("attnreg.injection.", "attnreg.diagnosis"),
    "Regularizers": (
        "attnreg.regularizers.",
        "attnreg.attendout.gnet",
    ),
    "Combine, schedule and write regularizers": ("attnreg.regularizer.",),
    "What a regularizer reads and returns": ("attnreg.masks.", "attnreg.sites."),
}
# Not names of `attnreg` itself, but returned, taken or raised by them.
BESIDES = [
    "injection.AttachHandle",
    "injection.LeftOut",
    "sites.HiddenInfo",
    "draws.Draws",
]
BESIDES += [
    "errors.InputError",
    "injection.NoAttentionError",
    "injection.CoverageWarning",
    "errors.AsleepWarning",
]


def grouped(package: str) -> dict[str, list[str]]:
    """Return the public names of a package, by the heading that they stand under."""
    module = importlib.import_module(package)
    if package == "attnreg.functional":  # it imports its names, so it has no stub
        return {
            "Functions": [
                name
                for name, value in vars(module).items()
                if inspect.isfunction(value)
            ]
        }
    homes = {
        name: home
        for name, home in listed_names(str(module.__file__)).items()
        if home != package
    }
    if package != "attnreg":
        return {"Names": list(homes)}
    groups = {
        title: [
            name for name, home in homes.items() if f"{home}.".startswith(within)
        ]
        for title, within in GROUPS.items()
    }
    assert sum(map(len, groups.values())) == len(homes), (
        "add the module of a public name to GROUPS"
    )
    return groups | {"Returned and raised": BESIDES}


def listing() -> str:
    """Return every public name with its first sentence, under the headings of its package."""
    lines: list[str] = []
    for package, groups in autosummary_context["groups"].items():
        for title, names in groups.items():
            head = title if package == "attnreg" else f"{package}: {title.lower()}"
            rows = [f"   ~{name}" for name in names]
            lines += [head, "-" * len(head), "", f".. currentmodule:: {package}", ""]
            lines += [".. autosummary::", "   :nosignatures:", "", *rows, ""]
    return "\n".join(lines)


PACKAGES = [
    "attnreg",
    "attnreg.functional",
    "attnreg.training",
    "attnreg.integrations",
]
autosummary_context = {"groups": {package: grouped(package) for package in PACKAGES}}
autosummary_generate_overwrite = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = (
    False  # an override without a docstring is described in its base class, once
)
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_custom_sections = ["Shape", "Reference"]
napoleon_use_ivar = True

# Gallery: scripts in `gallery` make pages in `examples`. They run, and may stop the build, with `-D plot_gallery=1`.
warnings.filterwarnings(
    "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
)  # peft's
plot_gallery = "False"
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "backreferences_dir": "examples/uses",
    "doc_module": ("attnreg",),
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
}

smartquotes = False  # it would make one dash of the two of an option
html_theme = "furo"
html_title = f"attnreg {release}"
html_logo = "_static/logo.svg"
html_theme_options = {}
if repository := PROJECT.get("urls", {}).get("Repository"):
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
pygments_style, pygments_dark_style = "default", "github-dark"
html_show_copyright = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


def with_own_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add what only the site needs to pages that are read in the repository, too."""
    if docname == "providers/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    if docname in ("families", "providers/families"):
        title, rest = source[0].split("\n", 1)
        field = '<input class="filter" type="search" placeholder="Show only rows and names with …" aria-label="Filter">'
        source[0] = f"{title}\n\n```{{raw}} html\n{field}\n```\n{rest}"
    if docname == "families":
        source[0] += "\n```{csv-table}\n:file: families.csv\n:header-rows: 1\n```\n"
    if docname == "reference":
        source[0] += f"\n{listing()}"
    if docname.startswith("providers/"):
        headings = " ".join(re.findall(r"^#+ (.*)", source[0], re.M))
        named = [
            name
            for name in attnreg.__all__
            if re.search(rf"\b{name}\b", headings) and name[0].isupper()
        ]
        links = ", ".join(f"{{py:class}}`attnreg.{name}`" for name in named)
        source[0] += f"\n**Arguments and methods:** {links}.\n" if named else ""
    if docname == "results":
        studies = sorted(
            path.parent.name
            for path in Path(app.srcdir, "results").glob("*/README.md")
        )
        source[0] += (
            "\n```{toctree}\n:hidden:\n\n"
            + "\n".join(f"results/{each}/README" for each in studies)
            + "\n```\n"
        )
    if docname == "symptoms":  # index entries come first in the search
        source[0] = re.sub(
            r"^## (?:The )?(.+)$",
            r"\g<0>\n\n```{index} ! \1\n```",
            source[0],
            flags=re.M,
        )
    # These are not in the site: the link downloads the file.
    source[0] = re.sub(
        r"\]\(((?:\.\./)+(?:benchmarks/\w+|CONTRIBUTING|CHANGELOG)\.md)(?:#[\w-]+)?\)",
        r"](path:\1)",
        source[0],
    )


def with_public_bases(
    app: Sphinx, name: str, obj: type, options: object, bases: list[type]
) -> None:
    """Name only bases that have a page, or are of other libraries."""
    public = {
        each
        for groups in autosummary_context["groups"].values()
        for names in groups.values()
        for each in names
    }
    shown = [
        each
        for each in obj.__mro__[1:]
        if not each.__module__.startswith("attnreg") or each.__name__ in public
    ]
    bases[:] = [each for each in bases if each in shown] or shown[:1]


def with_dashes(app: Sphinx, doctree: nodes.document) -> None:
    """Set the dash between a parameter and its description, which Sphinx leaves to smart quotes."""
    for text in list(doctree.findall(nodes.Text)):
        if text.astext() == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def with_heading_levels(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Give the captions of the sidebar, which Sphinx makes headings, the level that screen readers need."""
    tree = str(context.get("furo_navigation_tree", ""))
    level = 'role="heading" aria-level="2"'
    context["furo_navigation_tree"] = tree.replace('role="heading"', level)


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("doctree-read", with_dashes)
    app.connect("source-read", with_own_pages)
    app.connect("autodoc-process-bases", with_public_bases)
    app.connect("html-page-context", with_heading_levels, priority=900)  # after furo
