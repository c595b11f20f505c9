"""Providers written as text: what the text says is what is built, and nothing in it is ever run."""

import json

import pytest

import attnreg
from attnreg.experiments.options.provider import read_provider
from attnreg.regularizer.saving import describe
from tests.helpers.cases import bert_in_float64 as bert
from tests.helpers.commands import assert_sentence, ran

SMALL = ["--epochs", 1, "--train-size", 64, "--output-dir", "out"]


@pytest.mark.parametrize(
    ("text", "provider"),
    [
        ("AttentionLayerDrop()", lambda: attnreg.AttentionLayerDrop()),
        ("AttentionDropout(0.1,placement='scores')", lambda: attnreg.AttentionDropout(0.1, placement="scores")),
        (
            "AttentionDropout(.1, 'scores', rescale=False) & (AttentionLayerDrop(p=1e-1) & AttentionLayerDrop(1))",
            lambda: attnreg.AttentionDropout(0.1, "scores", rescale=False) & attnreg.AttentionLayerDrop(0.1) & attnreg.AttentionLayerDrop(1),
        ),
        (
            "OnLayers(CrossTuning(AttentionLayerDrop(0.2) & AttentionDropout(0.3), every=3), [0, -1])",
            lambda: attnreg.OnLayers(attnreg.CrossTuning(attnreg.AttentionLayerDrop(0.2) & attnreg.AttentionDropout(0.3), every=3), [0, -1]),
        ),
        ("Compose(AttentionDropout(0.5))", lambda: attnreg.Compose(attnreg.AttentionDropout(0.5))),
        ("BernoulliScheduleProvider([(0, 0.2), (1, 0.0)])", lambda: attnreg.BernoulliScheduleProvider([(0, 0.2), (1, 0.0)], total_steps=7)),
        ("BernoulliScheduleProvider([[0, 0.2], [1, 0.0]], total_steps=3)", lambda: attnreg.BernoulliScheduleProvider([[0, 0.2], [1, 0.0]], total_steps=3)),
        ("GNetProvider(initial_keep=0.8)", lambda: attnreg.GNetProvider.for_model(bert(), initial_keep=0.8)),
    ],
)  # fmt: skip
def test_the_text_says_what_is_built(text, provider):
    for typed in (text, read_provider(text)):
        parsed = attnreg.parse_provider(typed, bert(), total_steps=7)
        assert json.dumps(describe(parsed)) == json.dumps(describe(provider()))


OWN = """
import attnreg

class DropFirst(attnreg.MaskProvider):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, site):
        return attnreg.Mask(scores=site.keep(self.p))
"""


def test_a_class_of_a_file_runs_and_is_loaded_again(cli, tmp_path, undrawn):
    (tmp_path / "mine.py").write_text(OWN)
    words = ["--provider", "OnLayers(mine.py:DropFirst(p=.5), [0])&DropHead(0.1)", *SMALL]
    ran(cli("recipe", "regularize", *words))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["own"]["provider"] == "OnLayers(mine.py:DropFirst(p=0.5), [0]) & DropHead(0.1)"
    assert "out/plots/attention.png" in ran(cli("plot", "out")).stdout
    ran(cli("recipe", "regularize", *words, "--resume"))
    (tmp_path / "mine.py").write_text(OWN.replace("self.p = p", "self.p = p / 2"))
    assert "provider's class has changed" in ran(cli("plot", "out")).stderr
    assert_sentence(cli("recipe", "regularize", *words, "--resume"), 1, "the provider's file changed")


FAULTY = """
import attnreg

class A(attnreg.MaskProvider):
    {init}

    def forward(self, site):
        return {answer}
"""


@pytest.mark.parametrize(
    ("init", "answer", "says"),
    [
        ("", "site.keep(self.q)", "bad.py, line 8, in forward: AttributeError: 'A' object has no attribute 'q'"),
        ("", "site.keep({}['p'])", "bad.py, line 8, in forward: KeyError: 'p'"),
        ("def fail(self): assert False", "self.fail()", "bad.py, line 5, in fail: AssertionError"),
        ("", "site.keep(0.1)", "Expected A to return a Mask or None, got Tensor"),
        ("def __init__(self): self.q = 0.1", "site.keep(self.q)", r"Call `super\(\).__init__\(\)` first in A.__init__"),
    ],
)
def test_a_mistake_in_a_class_of_a_file_is_one_sentence(cli, tmp_path, init, answer, says):
    (tmp_path / "bad.py").write_text(FAULTY.format(init=init, answer=answer))
    words = ["recipe", "regularize", *SMALL]
    assert_sentence(cli(*words, "--provider", "bad.py:A()"), 1, says)
    (tmp_path / "bad.py").write_text(FAULTY.format(init="", answer="None"))
    ran(cli(*words, "--provider", "bad.py:A()"))  # nothing was kept that stands in the way; `__init__` is not needed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine.py:Drop(0.1)", "mine.py has no regularizer Drop, only DropFirst"),
        ("other.py:Drop(0.1)", "Provider file other.py not found"),
        ("mine.py:DropFirst(q=1)", r"Expected the arguments of DropFirst\(p\)"),
        ("broken.py:DropFirst(1)", "Cannot import the provider in broken.py: ZeroDivisionError"),
        ("ends.py:DropFirst(1)", "Cannot import the provider in ends.py: SystemExit: 3"),
        ("a b/mine.py:DropFirst(1)", "Expected a provider's file without spaces in its path, got 'a b/mine.py"),
        ("mine.py:DropFirst(1) & same/mine.py:DropFirst(1)", "Two classes are named DropFirst"),
        ("DropHead.py:DropHead(1)", "Another provider is named DropHead, too"),
    ],
)
def test_a_class_of_a_file_that_does_not_fit_is_one_sentence(cli, tmp_path, text, says):
    (tmp_path / "same").mkdir()
    head = OWN.replace("DropFirst", "DropHead")
    for name, content in {
        "mine.py": OWN,
        "same/mine.py": OWN,
        "broken.py": "1 / 0",
        "ends.py": "exit(3)",
        "DropHead.py": head,
    }.items():
        (tmp_path / name).write_text(content)
    assert_sentence(cli("recipe", "regularize", "--provider", text, *SMALL), 1, says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (" ", "Expected a provider such as"),
        ("AttentionDropout(0.1", r"was never closed\.$"),
        ("AttentionDropout(0.1) | AttentionLayerDrop()", "Expected provider calls joined by &"),
        ("attnreg.AttentionLayerDrop()", "Expected provider calls joined by &"),
        ("__import__('os').system('touch hacked')", "Expected provider calls joined by &"),
        ("AttentionDropout(__import__('os').system('touch hacked'))", "Expected provider calls joined by &"),
        ("AttentionDropout(open('hacked', 'w'))", "No provider is named"),
        ("AttentionDropout([x for x in (1,)])", "Expected numbers, strings, lists"),
        ("AttentionDropout(*[0.1])", "Expected numbers, strings, lists"),
        ("AttentionDropout(**{'p': 0.1})", "Expected every argument of AttentionDropout by name and only once"),
        ("AttentionDropout(0.1, 0.2, 0.3, 0.4)", "Expected the arguments of AttentionDropout"),
        ("OnLayers()", "Expected the arguments of OnLayers"),
        ("CrossTuning(3)", "Expected a regularizer in CrossTuning, got 3"),
        ("Compose(3)", "Expected a regularizer in Compose, got 3"),
        ("OnLayers('x', [0])", "Expected a regularizer in OnLayers, got the text 'x'"),
        ("(" * 300 + "AttentionLayerDrop()" + ")" * 300, "Expected a provider such as"),
        ("AttentionLayerDrop() & " * 50 + "AttentionLayerDrop()", "Expected a provider expression of at most 1000 characters"),
        ("StructuralMask(1, heads=[99])", r"Expected `heads` of .* to be below 6, got \[99\]"),
        ("AttributionProvider() & LearnableBernoulli()", "must be the only provider that looks at batches: remove AttributionProvider from"),
        ("DropHed(0.1)", r"No provider is named .* Did you mean DropHead\?"),
        ("DropHead(1.5)", r"Expected `p` to be a probability in \[0, 1\], got 1.5"),
        ("OnLayers(AttentionDropout(placement='score'), [0])", r"Did you mean scores\?"),
        ("HeadMask(99)", "Expected `heads` of .* to be below 6, got 99"),
        ("DropHead(p=0.1, p=0.2)", r"Expected every argument of DropHead by name and only once, got .DropHead\(p=0.1, p=0.2\)"),
        ("HeadMask({'provider': [1]})", "Expected numbers, strings, lists"),
        ("HeadMask([{1}])", "Expected numbers, strings, lists"),
        ("DropHead(" + "-" * 900 + "1)", "which is nested too deeply"),
        ("a" + ".a" * 450, "which is nested too deeply"),
        ("DropHead(" + "1+" * 480 + "1)", "which is nested too deeply"),
    ],
)  # fmt: skip
def test_anything_else_is_one_sentence(cli, tmp_path, text, says):
    assert_sentence(cli("recipe", "regularize", "--provider", text, *SMALL), 1, says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator:\nno memory"), OverflowError("no"), MemoryError()])
def test_what_cannot_be_made_is_one_sentence(cli, tmp_path, monkeypatch, error):
    def fail(self, p=0.2):
        raise error

    monkeypatch.setattr(attnreg.LayerDrop, "__init__", fail)
    says = "Cannot make .LayerDrop.p=0.1..: "
    assert_sentence(cli("recipe", "regularize", "--provider", "LayerDrop(p=0.1)", *SMALL), 1, says)
    assert list(tmp_path.iterdir()) == []


def test_a_composition_trains_and_goes_on(cli, tmp_path):
    text = "AttentionDropout(p=0.1,placement='scores')&OnLayers(AttentionLayerDrop(0.2), [0, -1])"
    whole = ran(cli("recipe", "regularize", "--provider", text, *SMALL, "--save-steps", 1))
    assert "The regularizer was active in 1 of 1 steps" in whole.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["own"]["provider"].startswith("AttentionDropout(p=0.1, placement='scores') & OnLayers(")
    other = cli("recipe", "regularize", "--provider", "AttentionLayerDrop(0.1)", *SMALL, "--resume")
    assert_sentence(other, 1, '--provider "AttentionDropout')
