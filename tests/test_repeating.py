"""One seed, one mask: by whatever route a model runs, and in repeated passes."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnreg
from tests.helpers.cases import MODELS, keep_few_activations, output
from tests.helpers.passes import without_dropout
from tests.helpers.provider_cases import MATRIX, PROVIDERS
from tests.helpers.repeated import IDS, SEED, bert, composed


class Recording(attnreg.MaskProvider):
    """Notes the masks of another provider, by site, in the order in which they were asked for."""

    def __init__(self, provider):
        super().__init__()
        self.provider = provider
        self.masks = {}

    def forward(self, site):
        mask = self.provider(site)
        self.masks.setdefault(site.label, []).append(mask.units_kept.expand(site.shape).clone())
        return mask


def expected(seed):
    """The masks of a pass, from its seed and each site's place alone."""
    torch.manual_seed(seed)
    of_pass = int(torch.randint(2**62, ()))
    masks = {}
    for layer in range(3):
        of_site = attnreg.functional.fold_seed(of_pass, layer)  # of the first computation of an encoder's layer
        b, h, q, k = (torch.arange(n) for n in (2, 2, 6, 6))
        grid = b[:, None, None, None], h[:, None, None], q[:, None], k
        kept = attnreg.functional.uniform_at(attnreg.functional.fold_seed(of_site, 1), *grid) >= 0.3
        keys = b[:, None, None, None], h[:, None, None], torch.tensor(0), k
        kept &= attnreg.functional.uniform_at(attnreg.functional.fold_seed(of_site, 2), *keys) >= 0.2
        masks[f"encoder.{layer}"] = kept
    return masks


def plainly(attention):
    model, provider = bert(attention), Recording(composed())
    with attnreg.attach(model, provider):
        torch.manual_seed(SEED)
        model(input_ids=IDS)
    return provider.masks


def flexible():
    if torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13")
    model, provider = bert("flex_attention"), Recording(composed())
    with attnreg.attach(model, provider) as handle, torch.no_grad(), handle.probing():
        torch.manual_seed(SEED)
        model(input_ids=IDS)
    return provider.masks


def checkpointed(*, reentrant, preserve, around="blocks"):
    model, provider = bert(), Recording(composed())
    options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
    with attnreg.attach(model, provider):
        if around == "blocks":
            keep_few_activations(model, options)
            model.enable_input_require_grads()
            torch.manual_seed(SEED)
            model(input_ids=IDS).logits.sum().backward()
        else:
            torch.manual_seed(SEED)
            vectors = model.get_input_embeddings()(IDS)
            checkpoint(lambda x: model(inputs_embeds=x).logits, vectors, **options).sum().backward()
    assert all(len(masks) == 2 for masks in provider.masks.values())
    return provider.masks


def compiled():
    torch._dynamo.reset()
    model, provider = bert(), Recording(composed())
    with attnreg.attach(model, provider):
        torch.manual_seed(SEED)
        torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=IDS)
    return provider.masks


def replayed():
    model, provider = bert(), Recording(composed())
    with attnreg.attach(model, provider) as handle:
        torch.manual_seed(SEED)
        model(input_ids=IDS)
        seed = handle.seed
        model(input_ids=IDS)
        assert handle.seed != seed
        provider.masks.clear()
        for mode in (True, False):
            model.train(mode)
            with torch.no_grad(), handle.replay(seed):
                model(input_ids=IDS)
    return provider.masks


ROUTES = {
    "written out": lambda: plainly("eager"),
    "fused": lambda: plainly("sdpa"),
    "flexible": flexible,
    "compiled": compiled,
    "replayed": replayed,
} | {
    f"checkpointed {around}, {'reentrant' if reentrant else 'not reentrant'}, "
    f"{'with' if preserve else 'without'} the generator": functools.partial(
        checkpointed, reentrant=reentrant, preserve=preserve, around=around
    )
    for reentrant, around in ((True, "blocks"), (False, "blocks"), (False, "the model"))
    for preserve in (True, False)
}


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("route", [pytest.param(route, marks=pytest.mark.slow if route == "compiled" else []) for route in ROUTES])  # fmt: skip
def test_one_seed_gives_one_mask(route):
    masks = ROUTES[route]()
    for label, mask in expected(SEED).items():
        assert masks[label]
        for each in masks[label]:
            assert torch.equal(each, mask)


def test_sites_passes_and_providers_draw_independently():
    model, provider = bert(), Recording(attnreg.DropKey(0.5) & attnreg.DropKey(0.5))
    with attnreg.attach(model, provider):
        torch.manual_seed(SEED)
        for _ in range(30):
            model(input_ids=IDS)
    kept = torch.stack([torch.stack(masks) for masks in provider.masks.values()]).double()
    assert abs(float(kept.mean()) - 0.25) < 0.02  # 0.5 if both drew the same
    both = (kept[0] * kept[1]).mean(), (kept[:, 1:] * kept[:, :-1]).mean()
    assert all(abs(float(each) - 0.0625) < 0.012 for each in both)


def test_masks_leave_the_rest_of_the_random_stream_alone():
    following = []
    drops = attnreg.AttentionDropout(0.1), attnreg.TokenDropout(0.3), attnreg.AttentionLayerDrop(0.1)
    for provider in (composed(), *drops):
        model = bert()
        with attnreg.attach(model, provider):
            torch.manual_seed(SEED)
            model(input_ids=IDS)
            following.append(float(torch.rand(())))
    assert len(set(following)) == 1


REPEATABLE = [case for case in MODELS if case.name in ("albert", "t5", "torch-encoder", "vit")]


@pytest.mark.parametrize("case", REPEATABLE, ids=str)
@pytest.mark.parametrize(
    "text", ["AttentionDropout(0.4)", "UniDrop(0.2, 0.3, 0.4)", "DropHead(0.5)", "AttentionLayerDrop(0.5)"]
)
def test_a_replay_gives_the_same_output(case, text):
    if "UniDrop" in text and not case.takes_token_ids:
        return
    model, batch = case.build(), case.batch()
    without_dropout(model)
    with attnreg.attach(model, attnreg.parse_provider(text, model)) as handle:
        outputs, seeds = [], []
        for _ in range(3):
            outputs.append(output(model, batch))
            seeds.append(handle.seed)
        for seed, once in zip(seeds, outputs, strict=True):
            with torch.no_grad(), handle.replay(seed):
                torch.testing.assert_close(output(model, batch), once, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in PROVIDERS if case.role == MATRIX], ids=str)
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parts_of_a_batch_have_the_masks_of_the_whole(case, checkpointed):
    model, ids = bert().double(), torch.arange(1, 25).remainder(20).view(4, 6)
    provider = case.make(model)
    parts = provider.parts()
    early = [type(each).__name__ for each in parts if each.draws_in_prepare or each.looks_at_batches]
    with attnreg.attach(model, provider.double(), own_dropout="seeded") as handle:
        if early:
            with pytest.raises(ValueError, match=f"{early[0]} decides for a whole batch"), handle.replay(SEED, [0]):
                pass
            return
        if checkpointed:
            keep_few_activations(model, {"use_reentrant": False})
        found, parameters = [], [*model.bert.parameters()]
        for parts in ([[0, 1, 2, 3]], [[3, 1], [2], [0]]):
            logits, grads = torch.empty(4, 2, dtype=torch.double), 0
            for rows in parts:
                with handle.replay(SEED, rows):
                    out = model(input_ids=ids[rows]).logits
                logits[rows] = out.detach()
                grads += torch.cat([each.flatten() for each in torch.autograd.grad(out.square().sum(), parameters)])
            found.append((logits, grads))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_rows_are_refused_where_draws_do_not_show_them():
    class Shared(attnreg.MaskProvider):
        def forward(self, site):
            return attnreg.Mask(scores=site.keep(0.5, (1, *site.shape[1:])))

    model = bert()
    handle = attnreg.attach(model, Shared())
    with (
        handle.replay(SEED, [2, 3]),
        pytest.raises(ValueError, match=r"shape \(1, 2, 6, 6\) do not show 2 samples: rep"),
    ):
        model(input_ids=IDS)
    with handle.replay(SEED, [2]), pytest.raises(ValueError, match="an index for each of 2 samples, got 1"):
        model(input_ids=IDS)


def test_ad_drop_repeats_its_latest_pass_and_refuses_others():
    model = bert()
    provider = attnreg.AttributionProvider(p=0.5, q=0.5)
    batch = {"input_ids": IDS, "labels": torch.tensor([0, 1])}
    with attnreg.attach(model, provider) as handle:
        provider.attribute(model, batch)
        once, seed = model(**batch).logits, handle.seed
        for _ in range(2):
            with torch.no_grad(), handle.replay():
                assert torch.equal(model(**batch).logits, once)
        provider.attribute(model, batch)
        with torch.no_grad(), handle.replay(seed):
            assert torch.equal(model(**batch).logits, once)
        model(**batch)
        for replay in (handle.replay(seed), handle.replay()):
            with replay, pytest.raises(RuntimeError, match="The attributions of that pass are gone"):
                model(**batch)
        provider.attribute(model, batch)
        model(**batch)
        handle.step()
        with handle.replay(), pytest.raises(RuntimeError, match=r"before `handle.step\(\)`"):
            model(**batch)


def test_a_generator_repeats_the_masks_that_it_drew_or_was_given():
    model = bert()
    generator = attnreg.GNetProvider.for_model(model)
    batch = {"input_ids": IDS}
    with attnreg.attach(model, generator) as handle:
        once, seed = model(**batch).logits, handle.seed
        other = model(**batch).logits
        assert not torch.equal(once, other)
        with torch.no_grad(), handle.replay(seed):
            assert torch.equal(model(**batch).logits, once)
        generator.sample(batch)
        given, seed = model(**batch).logits, handle.seed
        with torch.no_grad(), handle.replay(seed):
            assert torch.equal(model(**batch).logits, given)
        own = model(**batch).logits  # drawn after the given ones
        with torch.no_grad(), handle.replay():
            assert torch.equal(model(**batch).logits, own)
        generator.sample(batch)
        model(**batch)
        with handle.replay(seed), pytest.raises(RuntimeError, match="sampled for that pass are gone"):
            model(**batch)


def test_there_is_nothing_to_replay_before_the_first_pass():
    with attnreg.attach(bert(), composed()) as handle:
        assert handle.seed is None
        with pytest.raises(RuntimeError, match="No pass has drawn masks"), handle.replay():
            pass


class Own(attnreg.MaskProvider):
    def forward(self, site):
        return attnreg.Mask(scores=torch.rand(site.shape) > 0.4)


class OwnNoise(attnreg.HiddenProvider):
    def forward(self, site, states):
        return states + torch.randn(states.shape)


class OwnPreparation(attnreg.HiddenProvider):
    def prepare(self, inputs):
        self.factor = torch.rand(())

    def forward(self, site, states):
        return states * self.factor


class OwnSkips(attnreg.LayerDrop):
    def skips_block(self, site, draws):
        return torch.rand(()) < 0.5


@pytest.mark.parametrize("provider", [Own(), OwnNoise(), OwnPreparation(), OwnSkips()], ids=lambda p: type(p).__name__)
def test_masks_from_torchs_own_generator_are_not_repeated(provider):
    model = bert()
    with attnreg.attach(model, attnreg.DropKey(0.2) & provider) as handle, torch.no_grad():
        with torch.enable_grad():
            model(input_ids=IDS)
        with (
            pytest.raises(RuntimeError, match="cannot be repeated, because it draws from a global generator"),
            handle.replay(),
        ):
            model(input_ids=IDS)
