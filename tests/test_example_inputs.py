"""The inputs that are made up for a model when the user gives none."""

from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from attnreg.injection import NoAttentionError, discover
from attnreg.injection.discovery.example_inputs import example_inputs
from tests.helpers.cases import TRANSFORMERS, bert_in_float64, sample
from tests.sweep.zoo import WARNINGS, specimens

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS]
ZOO = {specimen.name: specimen for specimen in specimens()}
MODALITIES = [
    "audio-spectrogram-transformer", "blip", "bros", "clap", "clip", "idefics2_vision", "segformer",
    "speech_to_text", "videomae", "vilt", "vision-encoder-decoder",
    "wav2vec2", "whisper", "xclip",
]  # fmt: skip
USUAL = {"clap", "idefics2_vision", "vision-encoder-decoder", "whisper"}  # of unlike inputs


def sites(model, inputs=None):
    return [(s.info.name, s.info.stack, s.info.heads, s.layout.dims) for s in discover(model, inputs).sites]


@pytest.mark.parametrize("name", sample(MODALITIES, lambda name: name in USUAL))
def test_the_same_attention_is_found_as_with_inputs_of_ones_own(name):
    if name == "vision-encoder-decoder" and Version("5.20") > TRANSFORMERS:
        pytest.skip("this version of transformers has no default configuration of it")
    torch.manual_seed(0)
    model = ZOO[name].make()
    assert sites(model) == sites(model, ZOO[name].inputs(model))


def test_two_samples_in_the_precision_of_the_model():
    model = ZOO["clip"].make().to(torch.float64)
    made = example_inputs(model)
    assert list(made[0]) == ["input_ids", "attention_mask"]
    assert all(len(x) == 2 for inputs in made for x in inputs.values())
    assert {inputs["pixel_values"].dtype for inputs in made[1:]} == {torch.float64}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("perceiver", r"The inputs of PerceiverModel are unknown. Pass the arguments of one forward pass with two samples"),
        ("patchtst", r"The inputs of PatchTSTModel are unknown. Pass the arguments of one forward pass with two samples"),
        ("qwen2_vl_vision", r"does not run on example inputs \(.*\)\. Pass inputs that it accepts: `attach\(..., example_inputs="),
    ],
)  # fmt: skip
def test_what_is_not_known_is_asked_for(name, sentence):
    with pytest.raises(NoAttentionError, match=sentence):
        discover(ZOO[name].make())


def test_a_configuration_that_is_unusual_is_no_obstacle():
    model = ZOO["vit"].make()
    model.config = SimpleNamespace(image_size="large")
    with pytest.raises(NoAttentionError, match="Pass the arguments of one forward pass"):
        discover(model)


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds", "position_ids", "attention_mask"])
def test_expanded_inputs_find_the_same_as_their_copies(name):
    model = bert_in_float64()
    row = {"input_ids": torch.randint(3, 40, (1, 5)), "inputs_embeds": torch.rand(1, 5, 16, dtype=torch.float64)}
    row |= {"position_ids": torch.arange(5)[None], "attention_mask": torch.ones(1, 5)}
    del row["input_ids" if name == "inputs_embeds" else "inputs_embeds"]
    inputs = {key: each.expand(2, *each.shape[1:]) for key, each in row.items()}
    assert 0 in inputs[name].stride()
    copied = {key: each.clone(memory_format=torch.contiguous_format) for key, each in inputs.items()}
    assert len(sites(model, copied)) == 2
    assert sites(model, {**copied, name: inputs[name]}) == sites(model, inputs) == sites(model, copied)
