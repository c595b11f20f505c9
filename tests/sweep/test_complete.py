"""No model type is forgotten."""

import csv

import pytest
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.helpers.cases import TRANSFORMERS
from tests.sweep.page import PAGE, TABLE, page
from tests.sweep.zoo import not_built, specimens

pytestmark = pytest.mark.skipif(
    Version("5.24") > TRANSFORMERS, reason="the sweep is of the models of transformers 5.24"
)
RUN = "run `python -m tests.sweep.page`"


def test_every_model_type_is_built_or_has_its_reason():
    names = [specimen.name for specimen in specimens()]
    assert sorted([*names, *not_built()]) == sorted(CONFIG_MAPPING_NAMES)
    assert all(not_built().values())


def test_the_page_counts_the_rows_of_its_table_which_has_each_type_once():
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [(row["model type"], row["result"], row["detail"]) for row in csv.DictReader(file)]
    assert [name for name, *_ in rows] == sorted([*(specimen.name for specimen in specimens()), *not_built()]), RUN
    assert {name: detail for name, result, detail in rows if result == "not tried"} == not_built(), RUN
    assert PAGE.read_text(encoding="utf-8") == page(rows), RUN
    refused = sum(result == "refused" for _, result, _ in rows)
    tried = len(rows) - len(not_built())
    for place in ("../README.md", "attaching.md"):
        assert f"[{tried - refused} of {tried} model types]" in (PAGE.parent / place).read_text(encoding="utf-8")
    assert f"the other {refused} are refused" in (PAGE.parent / "attaching.md").read_text(encoding="utf-8")
