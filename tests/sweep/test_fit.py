"""A fit's ways of training, with a tiny model of every type that has a head for sequences."""

import warnings

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from attnreg.errors import InputError
from attnreg.experiments.fit.estimators import LONGEST
from attnreg.experiments.fit.tries import Try
from attnreg.experiments.tasks.models.pretrained import longest_input
from tests.helpers.bench import bench_with
from tests.sweep.zoo import WARNINGS, configuration

pytestmark = [pytest.mark.slow, *map(pytest.mark.filterwarnings, WARNINGS)]

NOT_BUILT = {"layoutlmv2": "it needs detectron2", "reformer": "it has an embedding for texts of exactly one length"}
WITHOUT_AD_DROP = {"diffllama", "fnet", "mra", "perceiver", "yoso"}  # no attention that can be masked, or in parts
REFUSED = {"eurobert": "has no linear head that reads one state per row"}


@pytest.mark.parametrize("name", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
def test_a_model_is_trained_in_all_ways(name, tiny, tmp_path):
    if name in NOT_BUILT:
        pytest.skip(NOT_BUILT[name])
    config = configuration(name)
    if name in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name]):
            bench_with(config, tiny, tmp_path)
        return
    bench = bench_with(config, tiny, tmp_path)
    bench.measure()
    ways = [{"fits_head": True}, {"contrasts": True}]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "AD-DROP is not tried")
        assert (bench.ad_drop_layer is None) == (name in WITHOUT_AD_DROP)
    ways += [] if name in WITHOUT_AD_DROP else [{"ad_drop": True}]
    train, held = np.arange(64), np.arange(80, 120)
    for which in (Try(), *(Try(2, 1e-3, **more) for more in ways)):
        network = bench.trained(which, train, 0, lambda: None)
        logits = bench.logits(network, bench.encoded[0].rows.select(held))
        assert np.isfinite(logits).all()
        bench.tokens.whole(network).save_pretrained(tmp_path / "model")
        alone = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        np.testing.assert_allclose(bench.logits(alone, bench.encoded[0].rows.select(held)), logits, atol=1e-4)
    bench.texts = bench.texts.select(range(20)).map(lambda row: {"text": row["text"] * 100})
    length = longest_input(bench.model, None, LONGEST)
    assert bench.read_longer(length)
    assert max(bench.kind.lengths(bench.encoded[length].rows)) == length
    assert bench.encoded[length].states.isfinite().all()
