"""Every provider from the command line: it trains, and the loss falls."""

import json

import pytest

from attnreg import providers

EXPRESSIONS = {
    "AdversarialAttention": "AdversarialAttention(initial_keep=0.9)",
    "AttentionDropout": "AttentionDropout(0.1)",
    "AttentionLayerDrop": "AttentionLayerDrop(0.1)",
    "AttributionProvider": "AttributionProvider(p=0.3, q=0.3)",
    "BernoulliScheduleProvider": "BernoulliScheduleProvider([(0, 0.2), (1, 0)])",
    "Compose": "DropHead(p=0.1) & OnLayers(AttentionDropout(0.1, placement='scores'), [0,1,2])",
    "ConcreteDropout": "ConcreteDropout(p=0.1, per='head')",
    "ContextualDropout": "ContextualDropout(p=0.1)",
    "CrossTuning": "CrossTuning(AttributionProvider(), every=2)",
    "DropAttention": "DropAttention(0.2, mode='column', window=2)",
    "DropHead": "DropHead(0.2, schedule='v')",
    "DropKey": "DropKey(0.2, end=0)",
    "GNetProvider": "GNetProvider(num_heads=6, feed_forward=True, share_embeddings=True)",
    "HeadMask": "HeadMask(1, by='importance')",
    "LayerDrop": "LayerDrop(0.1)",
    "LearnableBernoulli": "LearnableBernoulli(p=0.1)",
    "OnLayers": "OnLayers(HeadMask(2), [-1])",
    "StructuralMask": "StructuralMask(3, heads=[0, 1], keep_first=True)",
    "TokenDropout": "TokenDropout(0.1, keep_whole=0.5)",
    "UniDrop": "UniDrop()",
}
OPTIONS = ["--epochs", 8, "--train-size", 8, "--batch-size", 4, "--learning-rate", 5e-3]
OPTIONS += ["--validation-rows", 32, "--evaluate-every", 8]


def test_none_is_missing():
    assert {*EXPRESSIONS} == {*providers.__all__}


def losses(cli, tmp_path, *args):
    result = cli("recipe", *args, *OPTIONS, "--output-dir", "out")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "out" / "telemetry.jsonl").read_text().splitlines()]
    return result.output, [line["loss"] for line in lines]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_it_trains_from_the_command_line(cli, tmp_path, name):
    output, seen = losses(cli, tmp_path, "regularize", "--provider", EXPRESSIONS[name])
    assert sum(seen[-2:]) < 0.95 * sum(seen[:2])
    assert "The regularizer was active in" in output


@pytest.mark.parametrize("recipe", [["r-drop", "--alpha", 0.5], ["mixout", "--p", 0.1]], ids=lambda args: args[0])
def test_what_is_no_provider_trains_too(cli, tmp_path, recipe):
    _, seen = losses(cli, tmp_path, *recipe)
    assert sum(seen[-2:]) < 0.95 * sum(seen[:2])
