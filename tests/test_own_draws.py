"""What draws the model's own random numbers: rates, independence, checkpoints of functions, and what is refused."""

import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.errors import InputError
from attnreg.injection.running.own_draws import OwnDraws
from tests.helpers.own_dropout_cases import OPTIONS, SEED, Drawing, assert_same, batch_of, build
from tests.helpers.passes import Recomputing


class Two(nn.Module):
    """Draws in functions, in a module that is called twice, and in checkpoints within checkpoints."""

    def __init__(self, options=None):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.options = options

    def inner(self, x):
        return F.dropout(torch.tanh(self.two(F.dropout(x, 0.4, self.training))), 0.2, self.training)

    def outer(self, x):
        x = self.drop(self.one(F.dropout(x, 0.1, self.training)))
        x = self.maybe(self.inner, x)
        return self.drop(x) * torch.rand(len(x), 1)

    def maybe(self, run, x):
        return run(x) if self.options is None else checkpoint(run, x, **self.options)

    def forward(self, x):
        return self.maybe(self.outer, self.drop(x)) + self.maybe(self.inner, x)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def gradients(loss_of, options):
    """The gradients of several passes, whose backward passes come after the last of them."""
    torch.manual_seed(0)
    model = Two(options)
    attnreg.seeded(model)
    torch.manual_seed(1)
    loss_of(model, X.clone().requires_grad_()).backward()
    return [p.grad for p in model.parameters()]


def waiting(model, x):
    first, second = model(x), model(x)
    return (first * second).square().sum()


def around(options):
    def run(model, x):
        def both(x):
            return model(x) * model(x)

        return both(x).sum() if options is None else checkpoint(both, x, **options).sum()

    return run


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a reentrant checkpoint in another
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_checkpoints_of_functions_in_each_other_and_of_several_passes(options):
    assert_same([X, gradients(waiting, None)], [X, gradients(waiting, options)])
    for inside in (None, options):
        assert_same([X, gradients(around(None), None)], [X, gradients(around(options), inside)])


def followed(options):
    def run(model, x):
        def both(x):
            return F.dropout(model(F.dropout(model(x), 0.5)), 0.5)  # its own are outside of the model, and torch's

        return both(x).sum() if options is None else checkpoint(both, x, **options).sum()

    return run


@pytest.mark.parametrize("options", [each for each in OPTIONS if each["preserve_rng_state"]], ids=str)
def test_what_follows_a_model_in_a_checkpoint_draws_the_same_from_torch(options):
    assert_same([X, gradients(followed(None), None)], [X, gradients(followed(options), None)])


REFUSED = {
    "alpha dropout": (nn.Sequential(nn.AlphaDropout(0.5)), "Sequential draws random numbers from torch's generator"),
    "features": (nn.Sequential(nn.FeatureAlphaDropout(0.5)), "Sequential draws random numbers from torch's generator"),
    "nn.LSTM": (nn.Sequential(nn.LSTM(8, 8, 2, dropout=0.5)), "0 draws random numbers from torch's generator"),
    "integers": (Drawing(lambda x: x * torch.randint(2, x.shape)), "Drawing draws random numbers from torch's generator"),
    "numpy": (Drawing(lambda x: x * np.random.rand()), "Drawing draws random numbers from numpy's generator"),
    "Python": (Drawing(lambda x: x * random.random()), "Drawing draws random numbers from Python's generator"),
    "a generator": (Drawing(lambda x: x * torch.rand(8, generator=torch.Generator())), "a torch.Generator of its own"),
    "a foreign checkpoint": (Drawing(lambda x: Recomputing.apply(F.dropout, x)), r"within an autograd.Function \(Recomputing"),
    "torch.func": (Drawing(lambda x: torch.vmap(F.dropout, randomness="different")(x)), "draws under torch.func"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_repeated_is_refused_by_name(what):
    model, sentence = REFUSED[what]
    attnreg.seeded(model.train())
    with pytest.raises(RuntimeError, match=sentence):
        model(X.clone().requires_grad_())


@pytest.mark.parametrize(
    "own", [np.random.default_rng(0), np.random.RandomState(0), [random.Random(0)], {0: random.Random(0)}]
)
def test_a_generator_that_a_module_holds_is_refused(own):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    model[1].own = own
    with pytest.raises(InputError, match=r"1\.own is or holds a generator of its own, which does not follow the seed"):
        attnreg.seeded(model)
    assert not attnreg.is_attached(model)


def test_a_seed_is_an_integer():
    model = nn.Sequential(nn.Dropout())
    with pytest.raises(InputError, match=r"Expected an integer as seed, got 1\.5"), attnreg.seeded(model).replay(1.5):
        pass


@pytest.mark.parametrize("rows", [[0.9, 1], [True, False], [-1, 0], torch.zeros(2, 1, dtype=torch.int64)])
def test_rows_are_indices(rows):
    model = nn.Sequential(nn.Dropout())
    with pytest.raises(InputError, match=r"Expected `rows` to be indices"), attnreg.seeded(model).replay(1, rows):
        pass


def generators():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_the_generators_are_neither_read_nor_moved_but_for_one_seed():
    model = build("bert")
    handle, batch = attnreg.seeded(model), batch_of("bert")
    passes = []
    for seed in (1, 2, None):
        torch.manual_seed(seed or 3)
        expected = int(torch.randint(2**62, ())), generators()
        torch.manual_seed(seed or 3)
        with handle.replay(SEED) if seed else contextlib.nullcontext():
            passes.append(model(**batch).logits)
        assert generators() == expected[1]
    assert torch.equal(*passes[:2])
    assert handle.seed == expected[0]


KINDS = {
    "dropout": (lambda x: F.dropout(x, 0.3), (), 0.3),
    "in place": (nn.Dropout(0.3, inplace=True), (), 0.3),
    "torch": (lambda x: torch.dropout(x, 0.3, True), (), 0.3),
    "1d": (nn.Dropout1d(0.3), (2, 3), 0.3),
    "2d": (nn.Dropout2d(0.3), (2, 3), 0.3),
    "3d": (lambda x: F.dropout3d(x[:, :, None], 0.3)[:, :, 0], (2, 3), 0.3),
    "bernoulli": (lambda x: x * torch.empty_like(x).bernoulli_(0.7) / 0.7, (), 0.3),
    "probabilities": (lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)) / 0.7, (), 0.3),
    "rand": (lambda x: x * (torch.rand(x.shape) >= 0.3) / 0.7, (), 0.3),
    "uniform": (lambda x: x * (torch.empty_like(x).uniform_(-3, 7) >= 0) / 0.7, (), 0.3),
    "normal": (lambda x: x * (torch.randn_like(x) >= 0) * 2, (), 0.5),
    "exponential": (lambda x: x * (torch.empty_like(x).exponential_() < 2) / (1 - np.exp(-2)), (), np.exp(-2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rates_and_scale_are_those_of_torch(kind):
    run, shared, p = KINDS[kind]
    model = nn.Sequential(run if isinstance(run, nn.Module) else Drawing(run)).train()
    handle, x = attnreg.seeded(model), torch.ones(20, 30, 6, 7) if "1d" not in kind else torch.ones(20, 30, 42)
    passes = torch.stack([model(x.clone()) for _ in range(10)])
    dropped = passes == 0
    assert torch.allclose(passes[~dropped], torch.tensor(1 / (1 - p), dtype=torch.float32))
    units = dropped.flatten(3)[..., :1] if shared else dropped.flatten(3)
    assert (dropped.flatten(3) == units).all()
    bound = 5 * (p * (1 - p) / units.numel()) ** 0.5
    assert abs(float(units.double().mean()) - p) < bound
    assert abs(float((units[1:] & units[:-1]).double().mean()) - p * p) < 1.1 * bound  # of one pass and the next
    with handle.replay():
        assert torch.equal(model(x.clone()), passes[-1])


def test_layers_heads_and_draws_are_independent():
    model = build("bert", "eager")
    noted, inner = {}, OwnDraws.numbers

    def note(own, like, *args, **options):
        keep = inner(own, like, *args, **options)
        noted.setdefault(keep.shape, []).append(~keep)
        return keep

    batch = {name: value.repeat(8, 1) for name, value in batch_of("bert").items()}
    with attnreg.seeded(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnDraws, "numbers", note)
        for _ in range(6):
            model(**batch)
    weights, states = (torch.stack(each) for shape, each in noted.items() if len(shape) > 2)
    heads = torch.cat([weights[:, :, head] for head in (0, 1)])
    for drops in (heads.flatten(1), states.flatten(1)):
        drops = drops.double()
        n = drops.shape[1]
        assert ((drops.mean(1) - 0.1).abs() < 5 * (0.09 / n) ** 0.5).all()
        centred = drops - drops.mean(1, keepdim=True)
        correlations = torch.corrcoef(centred).fill_diagonal_(0)
        assert correlations.abs().max() < 5.5 / n**0.5


def test_draws_into_a_tensor_and_draws_that_are_refused():
    filled = Drawing(lambda x: torch.bernoulli(torch.full_like(x, 0.5), out=torch.full_like(x, 7.0)))
    attnreg.seeded(filled)
    assert set(filled(torch.zeros(40, 5)).unique().tolist()) == {0.0, 1.0}
    imaginary = Drawing(lambda x: torch.randn(x.shape, dtype=torch.complex64))
    attnreg.seeded(imaginary)
    with pytest.raises(InputError, match="draws complex numbers"):
        imaginary(torch.zeros(4, 5))
    features = Drawing(lambda x: x * torch.rand(3))  # not one for each of the three rows
    handle = attnreg.seeded(features)
    features(torch.ones(6, 3))
    with handle.replay(rows=[3, 4, 5]), pytest.raises(InputError, match="it is not known which of its values belong"):
        features(torch.ones(3, 3))


def test_nothing_is_said_of_a_regularizer_where_there_is_none():
    model = build("bert")
    assert "does not act" not in attnreg.seeded(model).report()
