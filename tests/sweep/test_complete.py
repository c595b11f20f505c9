"""No model type is forgotten."""

import re

import pytest
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.cases import TRANSFORMERS
from tests.sweep.page import PAGE
from tests.sweep.zoo import not_built, specimens

pytestmark = pytest.mark.skipif(
    Version("5.24") > TRANSFORMERS, reason="the sweep is of the models of transformers 5.24"
)
RUN = "run `python -m tests.sweep.page`"


def test_every_model_type_is_built_or_has_its_reason():
    names = [specimen.name for specimen in specimens()]
    assert sorted([*names, *not_built()]) == sorted(CONFIG_MAPPING_NAMES)
    assert all(not_built().values())


def test_the_page_names_each_once_and_counts_them():
    text = PAGE.read_text(encoding="utf-8")
    right, refused = text.split("## Right\n")[1].split("## Refused\n")
    refused, absent = refused.split("## Not tried\n")
    plain, said, others = (set(re.findall(r"`([\w.-]+)`(?=[,.]| \|)", part)) for part in re.split(r"\n## .*\n", right))
    causes, reasons = (
        {n for row in part.splitlines() if row[:3] == "| `" for n in _names(row)} for part in (refused, absent)
    )
    assert sorted(plain | said | others | causes) == sorted(specimen.name for specimen in specimens()), RUN
    assert reasons == set(not_built()), RUN
    count = len(plain | said | others)
    assert f"**{count} of {count + len(causes)} types are\nright, {len(causes)} are refused, 0 are wrong.**" in text
    assert not (plain | said | others) & causes
    for page in ("../README.md", "attaching.md"):
        assert f"[{count} of {count + len(causes)} model types]" in (PAGE.parent / page).read_text(encoding="utf-8")
    assert f"the other {len(causes)} are refused" in (PAGE.parent / "attaching.md").read_text(encoding="utf-8")


def _names(row):
    return re.findall(r"`([\w.-]+)`", row.split("|")[1])
