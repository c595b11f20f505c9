"""A Generator that reads patches of images: what it reads, that it learns, and which models it refuses."""

import copy

import pytest
import torch
import transformers as hf

import attnreg
from attnreg.attendout.credit import Teacher
from attnreg.attendout.network import GeneratorNetwork, PatchTokens
from attnreg.training import Reinforce
from attnreg.training.method import Updater

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {"image_size": 8, "patch_size": 4, **SIZES}


def vit(**options):
    torch.manual_seed(0)
    return hf.ViTForImageClassification(hf.ViTConfig(**{**VISION, **options}))


def test_a_token_is_a_linear_map_of_its_patch():
    tokens = PatchTokens(5, (2, 3, 2), before=2).double()
    pixels = torch.randn(4, 2, 6, 8, dtype=torch.float64)
    got, weight = tokens(pixels), tokens.projection.weight
    assert got.shape == (4, 2 + 8, 5)
    for image in range(4):
        assert torch.equal(got[image, :2], tokens.before)
        for number in range(8):
            row, column = divmod(number, 4)
            patch = pixels[image, :, 3 * row : 3 * row + 3, 2 * column : 2 * column + 2]
            expected = [float((patch * kernel).sum()) for kernel in weight.detach()]
            expected = torch.tensor(expected, dtype=torch.float64) + tokens.projection.bias
            assert torch.allclose(got[image, 2 + number], expected, atol=1e-12)


def test_logits_are_those_of_words_with_the_same_vectors():
    torch.manual_seed(0)
    images = GeneratorNetwork(1, 4, 3, 5, 1, 0.0, patch=(3, 4, 4)).double()
    words = GeneratorNetwork(10, 4, 3, 5, 1, 0.0).double()
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        vectors = images.tokens(pixels)
        words.tokens.weight.copy_(vectors.flatten(0, 1))
        others = {name: value for name, value in images.state_dict().items() if not name.startswith("tokens")}
        words.load_state_dict(others, strict=False)
    allowed = torch.ones(2, 5, 5, dtype=torch.bool)
    got, expected = images(pixels, allowed), words(torch.arange(10).view(2, 5), allowed)
    assert torch.allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "before"),
    [
        (lambda: vit(), 1),
        (lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**VISION)), 2),
        (lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**VISION)), 5),
        (lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)), 0),
    ],
    ids=["ViT", "DeiT", "registers", "SigLIP"],
)
def test_it_is_made_for_vision_transformers(make, before):
    torch.manual_seed(0)
    model = make()
    generator = attnreg.GNetProvider.for_model(model, masks_per_layer=2)
    assert (generator.vocab_size, generator.max_length, generator.num_layers) == (before, before + 4, 2)
    projection = next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    assert torch.equal(generator.network.tokens.projection.weight, projection.weight)
    with attnreg.attach(model.train(), generator) as handle:
        model(pixel_values=torch.randn(16, 3, 8, 8))
        assert set(handle.drop_rates()) == {"encoder.0", "encoder.1"}
        assert all(0.02 < rate < 0.3 for rate in handle.drop_rates().values())  # `initial_keep` is 0.9
        with pytest.raises(ValueError, match=r"Expected images of at most \d tokens, got \d+: resize, or raise"):
            generator.prepare({"pixel_values": torch.randn(2, 3, 16, 16)})


def test_positions_are_those_of_the_model():
    model = vit()
    with torch.no_grad():
        model.vit.embeddings.position_embeddings.normal_()
    generator = attnreg.GNetProvider.for_model(model)
    assert torch.equal(generator.network.positions.weight, model.vit.embeddings.position_embeddings[0])


def test_it_is_saved_and_copied(tmp_path):
    generator = attnreg.GNetProvider.for_model(vit())
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8)}
    generator.calibrate(inputs)
    generator.save_pretrained(tmp_path)
    for other in (attnreg.GNetProvider.from_pretrained(tmp_path), copy.deepcopy(generator)):
        assert torch.equal(other.keep_probability(inputs), generator.keep_probability(inputs))


def batch():
    """Sixteen images of four patches, each with one bright patch."""
    pixels = 0.3 * torch.randn(16, 3, 2, 4, 2, 4)  # two rows and two columns of patches
    place = torch.randint(4, (16,))
    for image, at in enumerate(place):
        pixels[image, :, at // 2, :, at % 2] += 1.0
    return {"pixel_values": pixels.reshape(16, 3, 8, 8), "labels": torch.zeros(16, dtype=torch.long)}, place + 1


@pytest.mark.parametrize("decisions", ["unit", "key"])
def test_rewarded_for_dropping_bright_patches_it_drops_these_more_than_others(decisions):
    torch.manual_seed(0)
    generator = attnreg.GNetProvider(1, 32, 2, 5, initial_keep=0.8, decisions=decisions, patch=[3, 4, 4])
    teacher = Teacher(Reinforce(per="sample", baseline="leave-one-out"), generator, Updater())
    generator.calibrate(batch()[0])
    for _ in range(60):
        gaps = []
        for _ in range(2):
            inputs, bright = batch()
            teacher.draw(inputs)
            dropped = 1 - generator.keep.float().mean((1, 2, 3))  # of each key, over layers and queries
            gaps.append(dropped[torch.arange(16), bright])
        teacher.update(torch.cat(gaps))
    inputs, bright = batch()
    dropped = 1 - generator.keep_probability(inputs)[:, :, 0].mean((1, 2))
    is_bright = torch.nn.functional.one_hot(bright, 5).bool()
    bright_rate, dark_rate = dropped[is_bright].mean(), dropped[:, 1:][~is_bright[:, 1:]].mean()
    assert torch.logit(bright_rate) > torch.logit(dark_rate) + 1.0


def test_positions_are_the_types_of_images():
    torch.manual_seed(0)
    generator = attnreg.GNetProvider(1, 32, 2, 7, initial_keep=0.5, decisions="type", patch=[3, 4, 4])
    inputs = {"pixel_values": torch.randn(6, 3, 8, 8)}
    generator.prepare(inputs)
    of_keys = generator.keep[:, :, 0, 0]  # (images, layers, positions)
    assert (generator.keep == of_keys[:1, :, None, None]).all()
    assert 0 < of_keys[0].sum() < 10
    chance = torch.sigmoid(generator.logits(inputs)[:, :, 0].mean((0, 2)))
    expected = torch.where(of_keys[0], chance, 1 - chance).log().mean()
    assert torch.allclose(generator.log_prob(inputs, generator.keep), expected.expand(6))


SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
CONVOLUTIONS = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_attention_heads": [1, 2], "num_encoder_blocks": 2,
                "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2],
                "decoder_hidden_size": 8}  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.SwinModel(hf.SwinConfig(image_size=8, patch_size=2, **SWIN)),
        lambda: hf.SegformerModel(hf.SegformerConfig(**CONVOLUTIONS)),
        lambda: hf.ViTMAEModel(hf.ViTMAEConfig(**VISION)),
    ],
    ids=["windows", "convolutions", "some patches only"],
)
def test_other_tokens_are_refused(make):
    with pytest.raises(
        ValueError, match=r"G-Net reads equal patches of an image, one for each token, which .* does not"
    ):
        attnreg.GNetProvider.for_model(make())


class ByColumns(torch.nn.Module):
    """A Vision Transformer whose patches come column by column."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 16, 4, 4)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True) for _ in "ab")

    def forward(self, pixel_values):
        x = self.patches(pixel_values).transpose(2, 3).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


def test_patches_in_another_order_are_refused():
    after = hf.YolosModel(hf.YolosConfig(num_detection_tokens=3, **{**VISION, "image_size": [8, 8]}))
    for model, example in ((after, None), (ByColumns(), {"pixel_values": torch.randn(2, 3, 8, 8)})):
        with pytest.raises(ValueError, match="reads the patches of an image row by row, after all other tokens, but"):
            attnreg.GNetProvider.for_model(model, example_inputs=example)


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(
        ValueError, match=r"`patch` must be \(channels, height, width\), without `causal`, got \[4, 4\]"
    ):
        attnreg.GNetProvider(1, 8, 2, patch=[4, 4])
    generator = attnreg.GNetProvider.for_model(vit())
    for inputs, got in (({"pixel_values": torch.zeros(2, 1, 8, 8)}, r"\(2, 1, 8, 8\)"), ({}, "none")):
        with pytest.raises(ValueError, match=f"Expected images of 3 channels, .*, got {got}"):
            generator.prepare(inputs)
