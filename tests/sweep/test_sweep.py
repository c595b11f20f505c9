"""Every model type is right under every check, or refused in a sentence."""

import functools
import re
import warnings

import pytest
from packaging.version import Version

from tests.helpers.cases import TRANSFORMERS
from tests.sweep.verdict import verdict
from tests.sweep.zoo import specimens

pytestmark = pytest.mark.skipif(
    Version("5.24") > TRANSFORMERS, reason="the sweep is of the models of transformers 5.24"
)

# Of the kinds of attention that this library has been wrong about, or could be; tests/test_contract.py has others.
SAMPLE = """
    deberta-v2 big_bird funnel longformer convbert canine t5 gpt_oss diffllama jamba swinv2 segformer qwen2_vl_vision
    time_series_transformer informer mamba
"""
ALL = {specimen.name: specimen for specimen in specimens()}


@functools.cache
def found_of(name, afterwards=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers' own code is warned of
        return verdict(ALL[name], afterwards=afterwards)


def check(name, afterwards=False):
    found = found_of(name, afterwards)
    assert not found.wrong
    if found.is_refused:
        assert re.match(r"\w.{40,}\.$", found.note, re.DOTALL), found.note  # it may begin with the name of a module


# Others are of the same kinds, or in tests/test_contract.py.
SLOW = [
    "deberta-v2",
    "t5",
    "jamba",
    "big_bird",
    "swinv2",
    "qwen2_vl_vision",
    "informer",
    "canine",
    "segformer",
    "funnel",
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SAMPLE.split()]
)
def test_a_sample(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_under_every_check(name):
    check(name, afterwards=True)


def test_what_is_refused_and_what_is_said_of_the_sample():
    refused = {name: found for name in ("informer", "mamba") if (found := found_of(name)).is_refused}
    assert "its queries are ordered differently from its keys" in refused["informer"].note
    assert "No attention that can be masked was found in MambaModel" in refused["mamba"].note
