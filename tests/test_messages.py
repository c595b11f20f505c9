"""What messages and pages say about each other: pages that messages name exist, and quoted messages are in the code."""

import ast
import re

import pytest
import torch
from torch import nn
from transformers import Trainer

import attnreg
from attnreg.errors import InputError
from attnreg.integrations import AttnRegCallback
from attnreg.training import AttackerDefender, FineTuning, RDropLoss, adamw
from attnreg.training.fine_tuning import split_batch
from tests.helpers.cases import BERT
from tests.helpers.repository import ROOT


@pytest.fixture(scope="module")
def texts():
    """All texts of the package; values that are filled in are an ellipsis."""
    found = []
    for path in [*(ROOT / "attnreg").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
            if " " in text or "/" in text:
                found.append(text)
    return found


def test_pages_that_messages_name_exist(texts):
    named = {page for text in texts for page in re.findall(r"\bdocs/[\w/-]+(?:\.md)?", text)}
    assert len(texts) > 1000
    assert not [page for page in named if not (ROOT / page).exists()]


class Classifier(nn.TransformerEncoder):
    """A model of one's own that returns logits."""

    def __init__(self):
        super().__init__(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)

    def forward(self, states):
        return super().forward(states).mean(1)


class Named(Classifier):
    """One that names its input as the models of transformers do."""

    def forward(self, input_ids):
        return super().forward(input_ids)


STATES = torch.ones(2, 3, 8)


def attributed(batch, **options):
    model, provider = Classifier(), attnreg.AttributionProvider(**options)
    with attnreg.attach(model, provider, example_inputs={"states": STATES}):
        provider.attribute(model, batch)


def attached():
    return attnreg.attach(Classifier(), attnreg.DropKey(0.1), example_inputs={"states": STATES})


def tuned(batch, make=Named, **options):
    model = make()
    FineTuning(model, adamw(model, 1e-3), **options).step(batch)


def stepped(batch):
    tuned(batch, Classifier, loss_function=lambda output, batch: output.sum())


def unnamed():
    model = BERT.build()
    model.config.return_dict = False
    FineTuning(model, adamw(model, 1e-3)).step(BERT.batch())


NOT_A_BATCH = r"Expected the batch to be a dict of arguments of Classifier.forward\(states\), got "
WRONG = [
    (lambda: attributed((STATES,)), NOT_A_BATCH + r"a tuple\.$"),
    (lambda: stepped(STATES), NOT_A_BATCH + r"a Tensor\.$"),
    (lambda: stepped({"state": STATES}), NOT_A_BATCH + r"'state' in it. Did you mean states\?$"),
    (lambda: attributed({}), NOT_A_BATCH + r"no 'states'\.$"),
    (lambda: attributed({"states": STATES}, target=lambda output, batch: 1.0), "Expected `target` to return a tensor, .*, got 1.0"),
    (lambda: FineTuning(Classifier(), 1e-3), r"Expected an optimizer, such as `adamw\(model, 1e-3\)`, got 0.001"),
    (lambda: AttnRegCallback(attnreg.UniDrop), r"got the class UniDrop: make one, as in UniDrop\(\)\.$"),
    (lambda: attnreg.DropHead & attnreg.DropKey(0.1), r"got the class DropHead: make one, as in DropHead\(\)\.$"),
    (lambda: attnreg.attach(attnreg.DropKey(0.1), Classifier()), r"`attach\(model, provider\)` takes the model first\.$"),
    (lambda: attnreg.attach(Classifier(), [attnreg.DropKey(0.1)]), r"got a list: compose regularizers with `a & b`\.$"),
    (lambda: attnreg.attach("bert-base-uncased", attnreg.DropKey(0.1)), "got 'bert-base-uncased': load the model first"),
    (lambda: attnreg.DropHead(nn.ModuleList(Classifier() for _ in range(3))), r"in \[0, 1\], got a ModuleList\.$"),
    (lambda: split_batch((STATES,), 2, Classifier()), NOT_A_BATCH + r"a tuple\.$"),
    (lambda: attnreg.AttributionProvider().attribute({"states": STATES}, Classifier()), r"Expected the model, the first argument, to be .* got a dict\.$"),
    (lambda: attached().on_epoch(1), r"AttachHandle has no attribute 'on_epoch': call `handle\.provider\.on_epoch`\.$"),
    (lambda: attached().sights, r"AttachHandle has no attribute 'sights'\.$"),
    (lambda: attnreg.CrossTuning(attnreg.DropKey(0.1)).on_epoch(0.5), "Expected `epoch` to be a whole number, got 0.5"),
    (lambda: attnreg.Scheduled(attnreg.DropKey(0.1), 9, p=(0.3, 0)), r"such as \[\(0, 0\.3\), \(1, 0\)\], got \(0\.3, 0\)\.$"),
    (lambda: adamw(Classifier().parameters(), 1e-3), r"Expected the model whose parameters will be trained, got a generator\.$"),
    (lambda: tuned({"input_ids": [[1, 2]]}), "Expected tensors in the batch, got a list as 'input_ids': collate its rows"),
    (lambda: tuned({"input_ids": STATES.numpy()}), "Expected tensors in the batch, got a ndarray as 'input_ids': collate its rows"),
    (lambda: tuned({}, loss_function=nn.CrossEntropyLoss()), r"`loss_function` to be a function of the model's output and the batch, got Cross"),
    (lambda: tuned({}, objective=RDropLoss), r"`objective` to be a function of .* such as RDropLoss\(\), got <class"),
    (lambda: tuned({}, objective="rdrop"), r"`objective` to be a function of .* such as RDropLoss\(\), got 'rdrop'\.$"),
    (lambda: AttackerDefender(Classifier(), None, adamw(Classifier(), 1e-3)), "`optimizer_factory` to be a function of a network, such as"),
    (lambda: attnreg.DropHead(0.1) + attnreg.DropKey(0.1), r"^Regularizers are not added: compose them with `a & b`\.$"),
    (lambda: sum([attnreg.DropHead(0.1), attnreg.DropKey(0.1)]), r"compose them with `a & b`\.$"),
    (lambda: attnreg.DropHead(0.1) and attnreg.DropKey(0.1), "compose with `a & b` instead of `a and b`, and ask .* `is not None`"),
    (lambda: attnreg.DropHead(0.1) or attnreg.DropKey(0.1), "compose with `a & b` instead of `a and b`"),
    (lambda: Trainer(Classifier(), callbacks=[attnreg.DropHead(0.1)]), r"^DropHead is a regularizer, not a callback: pass `callbacks=\[AttnRegCallback"),
    (lambda: Trainer(Classifier(), callbacks=[attached()]), r"AttachHandle has no attribute 'on_init_end': pass `callbacks=\[AttnRegCallback\(handle\)\]`\.$"),
    (attnreg.ConcreteDropout, r"^ConcreteDropout needs sizes of the model, such as `num_layers`: use `ConcreteDropout\.for_model\(model\)`\.$"),
    (attnreg.AdversarialAttention, r"use `AdversarialAttention\.for_model\(model\)`\.$"),
    (lambda: attnreg.attach(Classifier(), attnreg.DropHead(0.1), layers=0, example_inputs={"states": STATES}), r"non-empty list, or None for all, got 0: write \[0\]\.$"),
    (lambda: attnreg.OnLayers(attnreg.DropHead(0.1), 0), r"at least one index, got 0: write \[0\]\.$"),
    (lambda: unnamed(), r"^The model's output is a tuple, without names: set `return_dict=True` in its config\.$"),
    (lambda: attnreg.Drophead, "'attnreg' has no attribute 'Drophead'. Did you mean DropHead"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_argument_gets_one_sentence_with_the_fix(call, says):
    with pytest.raises((InputError, TypeError, AttributeError), match=says) as caught:
        call()
    assert len(str(caught.value)) < 250


def quotes():
    text = (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8")
    return re.findall(r'^\| "([^"|]+)"', text, re.M)


@pytest.mark.parametrize("quote", quotes())
def test_quoted_messages_are_in_the_code(quote, texts):
    pieces = [piece.strip() for piece in quote.replace("`", "").split("…") if len(piece.strip()) > 7]
    clean = [text.replace("`", "") for text in texts]
    assert pieces, quote
    assert any(all(piece in text for piece in pieces) for text in clean), quote
