"""What each provider draws."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg.draws import Draws
from tests.helpers.reference import close

SITE = attnreg.AttentionSite(shape=(4, 8, 30, 30), num_layers=3)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("placement", ["weights", "scores"])
def test_attention_dropout_drops_at_its_rate(p, placement):
    torch.manual_seed(0)
    mask = attnreg.AttentionDropout(p, placement=placement)(SITE)
    units = mask.scores if placement == "scores" else mask.weights
    assert units.shape == SITE.shape
    assert close((units == 0).float().mean(), p, units.numel())
    kept = units[units != 0]
    assert placement == "scores" or not len(kept) or (kept.unique() == torch.tensor(1 / (1 - p))).all()
    assert attnreg.AttentionDropout(p, rescale=False)(SITE).weights.dtype == torch.bool


@pytest.mark.parametrize(
    "drops",
    [
        lambda p: attnreg.AttentionLayerDrop(p)(SITE).drops_layer,
        lambda p: bool(attnreg.LayerDrop(p).skips_block(attnreg.SiteInfo(), Draws())),
    ],
)
def test_layers_and_blocks_are_dropped_at_their_rate(drops):
    torch.manual_seed(0)
    assert close(np.mean([drops(0.3) for _ in range(3000)]), 0.3, 3000)


class Operations(TorchDispatchMode):
    """Names of all operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_dropped_layer_computes_no_scores(p):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    with attnreg.attach(layer, attnreg.AttentionLayerDrop(p)), Operations() as operations:
        layer(torch.randn(2, 3, 8)).sum().backward()
    scores = {name for name in operations.names if "softmax" in name or "scaled_dot_product" in name or "bmm" in name}
    assert bool(scores) == (p == 0)


def test_schedule_follows_its_lines_layer_by_layer():
    knots = [[(0, 0.6), (1, 0.2)], [(0, 0.0), (0.5, 0.4), (1, 0.1)], [(0.25, 1.0), (0.75, 0.0)]]
    provider = attnreg.BernoulliScheduleProvider(knots, total_steps=20)
    for step in range(25):
        expected = [np.interp(min(step / 20, 1), *zip(*line, strict=True)) for line in knots]
        assert np.allclose(provider.rates.numpy(), expected, atol=1e-6)
        for layer, rate in enumerate(expected):
            torch.manual_seed(step)
            site = attnreg.AttentionSite(shape=SITE.shape, layer=layer, num_layers=3)
            keep = provider(site).scores
            assert close((~keep).float().mean(), rate, keep.numel())
        provider.step()


def test_a_schedule_for_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match=r"or one per layer \(3\), got 2"):
        attnreg.BernoulliScheduleProvider([[(0, 0.1)], [(0, 0.2)]], 10).check([SITE], None)


class Fixed(attnreg.MaskProvider):
    def __init__(self, scores=None, weights=None):
        super().__init__()
        self.scores, self.weights = scores, weights

    def forward(self, site):
        return None if self.scores is None and self.weights is None else attnreg.Mask(self.scores, self.weights)


def test_composition_is_and_of_scores_and_product_of_weights():
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    mask = (Fixed(scores=a) & Fixed(scores=b, weights=torch.tensor(2.0)) & Fixed(weights=torch.tensor(3.0)))(SITE)
    assert torch.equal(mask.scores, a & b)
    assert mask.weights == 6
    assert (Fixed() & Fixed())(SITE) is None


def test_composition_counts_what_is_kept():
    relaxed = attnreg.Mask(weights=torch.tensor([0.9, 0.1]), kept=torch.tensor([True, False]))
    hard = attnreg.Mask(scores=torch.tensor([False, True]), normalized=torch.tensor([True, True]))
    assert (relaxed & hard).units_kept.tolist() == (hard & relaxed).units_kept.tolist() == [False, False]
    assert (relaxed & relaxed).units_kept.tolist() == [True, False]
    assert attnreg.Mask().units_kept is None


def test_rows_are_normalized_before_other_factors_apply_in_whatever_order():
    weights = torch.rand(1, 2, 3, 3, dtype=torch.float64).softmax(-1).requires_grad_()
    heads = attnreg.Mask(weights=torch.tensor([2.0, 0.0], dtype=torch.float64).view(1, 2, 1, 1))  # one head is gone
    keep = torch.tensor([True, False, True])
    for detach in (False, True):
        keys = attnreg.Mask(normalized=keep, detach_sum=detach)
        expected = attnreg.functional.renormalized(weights, keep, detach_sum=detach) * heads.weights
        for mask in (heads & keys, keys & heads):
            assert torch.equal(mask.of_weights(weights, None), expected)
            assert not mask.of_weights(weights, None)[:, 1].any()
            assert mask.detach_sum == detach
    constant, other = attnreg.Mask(normalized=keep, detach_sum=True), attnreg.Mask(normalized=keep)
    assert (constant & other).detach_sum is (other & constant).detach_sum is False
    assert (constant & attnreg.Mask() & constant).detach_sum


def test_what_is_learned_by_the_loss_is_told_of_all_parts_once():
    concrete, frozen = attnreg.ConcreteDropout(2), attnreg.ConcreteDropout(2).requires_grad_(False)
    game = attnreg.GNetProvider(10, 4, 2)
    both = attnreg.OnLayers(concrete & game, [0]) & frozen & attnreg.AttentionLayerDrop()
    assert len(list(both.parameters())) > 2
    assert [id(parameter) for parameter in both.learned_parameters()] == [id(concrete.logits)]


class Prepared(Fixed):
    seen = 0

    def prepare(self, inputs):
        self.seen += 1


def test_what_is_off_is_not_prepared():
    off, on = Prepared(), Prepared()
    both = attnreg.CrossTuning(off) & on & Prepared().eval()
    both.prepare({})
    assert (off.seen, on.seen, both.providers[-1].seen) == (0, 1, 0)
    both.on_epoch(1)
    both.prepare({})
    assert (off.seen, on.seen) == (1, 2)


class Penalized(Fixed):
    def penalty(self):
        return torch.tensor(2.0)


def test_penalties_add_up_where_they_are_active():
    quiet = attnreg.CrossTuning(Penalized())  # in epoch 0
    assert attnreg.OnLayers(Penalized() & Penalized() & quiet & Fixed(), [0]).penalty() == 4
    assert Fixed().penalty() is None
    assert quiet.penalty() is None
    quiet.on_epoch(1)
    assert quiet.penalty() == 2


LAYERDROP = {"provider": "AttentionLayerDrop", "config": {"p": 0.1}}


@pytest.mark.parametrize(
    ("config", "tensors", "sentence"),
    [
        (None, {}, "Cannot load a provider"),
        ("{", {}, "Cannot load a provider"),
        ([1], {}, "Cannot load a provider"),
        ({"provider": "os.system", "config": {}}, {}, "Expected `provider` to be one of .*AttentionLayerDrop"),
        ({"provider": "MaskProvider", "config": {}}, {}, "Expected `provider` to be one of"),
        ({**LAYERDROP, "config": {"q": 1}}, {}, r"Expected the arguments of AttentionLayerDrop\(p=0.05\), got .*'q'"),
        ({**LAYERDROP, "config": {"p": 7}}, {}, "Expected `p`"),
        (LAYERDROP, {"x": torch.ones(1)}, "Unexpected key"),
        ({"provider": "Compose", "config": {}}, {}, "Expected the arguments of Compose"),
    ],
)
def test_missing_foreign_and_damaged_files_are_refused(config, tensors, sentence, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=sentence):
        attnreg.Regularizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("from_within", [False, True])
def test_saving_again_replaces_the_folder(tmp_path, monkeypatch, from_within):
    if from_within:
        (tmp_path / "p").mkdir()
        monkeypatch.chdir(tmp_path / "p")
    for p in (0.1, 0.2):
        attnreg.AttentionLayerDrop(p).save_pretrained(tmp_path / "p")
    for cls in (attnreg.Regularizer, attnreg.AttentionLayerDrop):
        assert cls.from_pretrained(tmp_path / "p").p == 0.2
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_provider_that_forgets_its_arguments_says_so_when_saved(tmp_path):
    class Forgetful(attnreg.MaskProvider):
        def __init__(self, rate):
            super().__init__()

        def forward(self, site): ...

    with pytest.raises(ValueError, match="missing rate"):
        Forgetful(0.1).save_pretrained(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_saving_beside_other_files_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="save into another folder"):
        attnreg.AttentionLayerDrop(0.1).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"a model"


def test_sites_know_their_heads_where_that_can_be_known():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    with attnreg.attach(model, attnreg.DropHead(0.1)) as handle:
        assert [site.heads for site in handle.sites] == [2, 2]
    assert attnreg.SiteInfo().heads is None
    assert SITE.heads == 8


class Mine(attnreg.MaskProvider):
    """A provider of one's own."""

    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, site):
        return None


class AttentionLayerDrop(Mine):  # the name of a built-in one
    pass


def test_a_provider_of_ones_own_is_passed(tmp_path):
    Mine(0.3).save_pretrained(tmp_path / "p")
    assert Mine.from_pretrained(tmp_path / "p").p == 0.3
    assert attnreg.Regularizer.from_pretrained(tmp_path / "p", [Mine]).p == 0.3
    with pytest.raises(
        ValueError, match=r"Expected `provider` to be one of .*, got 'tests\.test_providers\.Mine'; pass"
    ):
        attnreg.Regularizer.from_pretrained(tmp_path / "p")
    (attnreg.AttentionDropout(0.1) & Mine(0.4)).save_pretrained(tmp_path / "both")
    assert attnreg.Compose.from_pretrained(tmp_path / "both", [Mine]).providers[1].p == 0.4
    assert attnreg.parse_provider("Mine(0.2) & DropHead(0.1)", providers=[Mine]).providers[0].p == 0.2


def test_no_class_stands_for_another(tmp_path):
    AttentionLayerDrop(0.3).save_pretrained(tmp_path / "mine")
    attnreg.AttentionLayerDrop(0.2).save_pretrained(tmp_path / "theirs")
    assert type(attnreg.parse_provider("AttentionLayerDrop(0.1)")) is attnreg.AttentionLayerDrop
    for folder, cls in (("mine", AttentionLayerDrop), ("theirs", attnreg.AttentionLayerDrop)):
        assert type(attnreg.Regularizer.from_pretrained(tmp_path / folder, [AttentionLayerDrop])) is cls
        assert type(cls.from_pretrained(tmp_path / folder)) is cls
    with pytest.raises(ValueError, match=r"Expected a AttentionLayerDrop in .*, got a AttentionLayerDrop"):
        AttentionLayerDrop.from_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="Another provider is named AttentionLayerDrop, too: rename tests"):
        attnreg.parse_provider("AttentionLayerDrop(0.1)", providers=[AttentionLayerDrop])
    with pytest.raises(ValueError, match="No provider is named") as caught:
        attnreg.parse_provider("Nothing()")
    assert "Mine" not in str(caught.value)
