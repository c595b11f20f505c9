"""Every model type is right under every check, or refused in a sentence."""

import re
import warnings

import pytest

from tests.sweep.verdict import verdict
from tests.sweep.zoo import specimens

# One of each kind of attention that this library has been wrong about, or could be.
SAMPLE = [
    "bert",
    "albert",
    "deberta-v2",
    "big_bird",
    "funnel",
    "longformer",
    "convbert",
    "canine",
    "t5",
    "bart",
    "pegasus_x",
    "gpt2",
    "llama",
    "gpt_oss",
    "gemma3",
    "diffllama",
    "deepseek_v4",
    "jamba",
    "swinv2",
    "segformer",
    "qwen2_vl_vision",
    "clip",
    "time_series_transformer",
    "informer",
    "mamba",
]
ALL = {specimen.name: specimen for specimen in specimens()}


def check(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers' own code is warned of
        found = verdict(ALL[name])
    assert not found.wrong
    if found.is_refused:
        assert re.match(r"[A-Z].{40,}\.$", found.note, re.DOTALL), found.note


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in SAMPLE])
def test_all_others(name):
    check(name)


def test_what_is_refused_and_what_is_said_of_the_sample():
    refused = {name: found for name in ("informer", "mamba") if (found := verdict(ALL[name])).is_refused}
    assert "its queries are ordered differently from its keys" in refused["informer"].note
    assert "No attention that can be masked was found in MambaModel" in refused["mamba"].note
