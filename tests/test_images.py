"""Image classification: a folder of images, its checks, and runs on it."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers as hf
from packaging.version import Version
from PIL import Image

from attnreg.errors import InputError
from attnreg.experiments.tasks import choose_task, load_data, load_model
from attnreg.experiments.tasks.kinds import kind_class
from tests.helpers import task_data as made
from tests.helpers.cases import TRANSFORMERS
from tests.helpers.commands import assert_sentence, ran
from tests.helpers.recipe_cases import assert_evaluated_as_trained

TASK = ["--task", "custom", "--kind", "image-classification", "--device", "cpu", "--batch-size", 8, "--epochs", 2]


def bars(folder, count, seed):
    """Horizontal or vertical bright bars on noise."""
    noise = np.random.default_rng(seed)
    for number in range(count):
        label = ("horizontal", "vertical")[number % 2]
        pixels = noise.integers(0, 100, (8, 8, 3), dtype=np.uint8)
        at = noise.integers(0, 8)
        pixels[(at, slice(None)) if label == "horizontal" else (slice(None), at)] = 255
        (folder / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / label / f"{number}.png")


def save(folder, model, config):
    torch.manual_seed(0)
    made.save(folder, model(config), hf.ViTImageProcessor(size={"height": 8, "width": 8}))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    bars(root / "bars" / "train", 24, 0)
    bars(root / "bars" / "val", 10, 1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    save(root / "vit", hf.ViTModel, hf.ViTConfig(image_size=8, patch_size=4, **sizes))
    try:
        hf.AutoImageProcessor.from_pretrained(root / "vit")
    except ImportError:
        if Version("5.20") <= TRANSFORMERS:
            raise
        pytest.skip("this version of transformers reads images with torchvision, which is not installed")
    return root


@pytest.fixture
def args(places):
    return [*TASK, "--data-dir", places / "bars", "--model", places / "vit"]


def test_batches_are_what_the_processor_makes_of_the_images(places):
    task, splits = load_data(choose_task("custom", kind="image-classification"), places / "bars")
    assert task.labels == ("horizontal", "vertical")
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 24, "validation": 10}
    model, processor = load_model(task, str(places / "vit"))
    kind = kind_class(task.kind)(task, processor, 128)
    encoded = kind.encode(splits["validation"])
    batch = kind.collate([encoded[number] for number in (0, 9)])
    assert batch["labels"].tolist() == [0, 1]
    for number, pixels in zip((0, 9), batch["pixel_values"], strict=True):
        whole = np.asarray(splits["validation"][number]["image"], dtype=np.float32) / 255
        assert torch.allclose(pixels, torch.from_numpy((whole - 0.5) / 0.5).permute(2, 0, 1), atol=1e-5)
    assert model(**batch).logits.shape == (2, 2)


def test_a_run_is_saved_and_evaluated(cli, places, args, tmp_path, undrawn):
    assert_evaluated_as_trained(cli, tmp_path, args, places / "bars", rows=10)
    plain = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "ad-drop" / "model")
    assert plain.config.id2label == {0: "horizontal", 1: "vertical"}


def test_rows_held_out_of_a_folder_without_splits(cli, places, args, tmp_path):
    whole = [*args[:-4], "--data-dir", places / "bars" / "train", *args[-2:]]
    ran(cli("recipe", "finetune", *whole, "--validation-rows", 6, "--output-dir", "out"))
    assert json.loads((tmp_path / "out" / "result.json").read_text())["rows"] == 18


def test_only_folders_are_splits(places, tmp_path):
    for number, name in enumerate(("train_1", "test_1", "my test", "other")):
        shutil.copytree(
            places / "bars" / "val" / "vertical", tmp_path / "f [1]" / ("train set", "b")[number % 2] / name
        )
    task, splits = load_data(
        choose_task("custom", kind="image-classification"), tmp_path / "f [1]", needs_validation=False
    )
    assert (len(splits["train"]), task.labels) == (20, ("my test", "other", "test_1", "train_1"))


def test_what_does_not_fit_is_one_sentence(cli, places, args, tmp_path):
    result = cli("recipe", "attendout", *args, "--output-dir", "out")
    assert_sentence(
        result, 1, "ViTForImageClassification takes no token ids, or has no single embedding table for them"
    )
    bars(tmp_path / "broken" / "train", 4, 0)
    bars(tmp_path / "broken" / "validation", 4, 1)
    (tmp_path / "broken" / "train" / "vertical" / "1.png").write_bytes(b"\x89PNG no more")
    task = choose_task("custom", kind="image-classification")
    with pytest.raises(InputError, match=r"Cannot read the image in row 3 of split train of .*broken"):
        load_data(task, tmp_path / "broken")
    deep = np.full((8, 8), 50_000, dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "broken" / "train" / "vertical" / "1.png")
    with pytest.raises(
        InputError, match=r"Expected images of 8 bits, got mode I;16 in row 3 of split train of .*broken"
    ):
        load_data(task, tmp_path / "broken")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"Cannot read .*empty as a folder of images"):
        load_data(task, tmp_path / "empty")
    with pytest.raises(InputError, match="Expected --data-dir to be a folder or a file, got nowhere"):
        load_data(task, "nowhere")
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text('{"image": "a.png", "label": 0}\n{"image": "b.png", "label": 1}\n')
    with pytest.raises(InputError, match=r"Expected images in column image of split train .*, got Value\(.*'string'"):
        load_data(task, tmp_path)
