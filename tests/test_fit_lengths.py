"""The length at which a fit cuts texts: longer where linear probes gain by it, and there is time."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.errors import AttnRegWarning
from attnreg.experiments.fit import race, tries
from attnreg.experiments.fit.clock import Clock
from attnreg.experiments.fit.race import Race
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.tries import Bench, Try
from attnreg.experiments.setup.batches import in_order
from attnreg.training import FineTuning
from tests.helpers.bench import MadeUp, tiny_bench

SMALL = {"vocab_size": 500, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CPU = torch.device("cpu")
GIVEN = [f"text {number}" for number in range(200)], [number % 2 for number in range(200)]


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """A folder with a model of 300 positions and the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("model")
    hf.AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    hf.set_seed(0)
    hf.BertModel(hf.BertConfig(**SMALL, max_position_embeddings=300, pad_token_id=0)).save_pretrained(folder)
    return folder


def texts(before, after=60, count=80):
    """Texts, and their class, of which only the words after the first ones tell."""
    words = ["boy", "girls"]
    return [
        ["the " * (before + number % 7) + f"{words[number % 2]} " * after for number in range(count)],
        [f"{word} first" for word in words] * (count // 2),
    ]


def fitted(model, rows, **options):
    return attnreg.TextClassifier(str(model), budget="2s", **options).fit(*rows)


def test_texts_are_cut_where_probes_gain(model, tmp_path, monkeypatch):
    monkeypatch.setattr(race, "LONGER", 1e6)  # there is time, however busy the machine
    rows = texts(140)
    classifier = fitted(model, rows)
    assert classifier.outcome_.best.max_length == 256
    assert ", 256 tokens)" in classifier.best_
    assert [*classifier.predict(rows[0][:10])] == rows[1][:10]
    assert classifier.doubt([rows[0][0]]) == ""
    assert classifier.doubt([rows[0][0] * 2]) == "cut at 256 tokens"
    classifier.save(tmp_path / "saved")
    loaded = attnreg.TextClassifier.load(tmp_path / "saved")
    np.testing.assert_allclose(loaded.predict_proba(rows[0][:9]), classifier.predict_proba(rows[0][:9]), atol=1e-5)
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "saved").model_max_length == 256
    alone = hf.pipeline("text-classification", str(tmp_path / "saved"), device="cpu")
    assert [each["label"] for each in alone(rows[0][:9])] == rows[1][:9]


@pytest.mark.parametrize(
    ("before", "options"), [(140, {"max_length": 128}), (10, {})], ids=["as it is asked for", "few are cut"]
)
def test_texts_are_cut_as_usual(model, before, options):
    rows, labels = texts(before)
    rows[:8] = [2 * text for text in rows[:8]]  # which are cut
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*are cut by --max-length 128")
        classifier = fitted(model, (rows, labels), **options)
    assert all(way.max_length == 0 for way in [*classifier.outcome_.tries, *classifier.outcome_.dropped])
    assert classifier._kind.max_length == 128


def test_a_model_reads_no_more_than_its_positions(model, monkeypatch):
    monkeypatch.setattr(race, "LONGER", 1e6)
    with pytest.warns(AttnRegWarning, match=r"80 of 80 texts \(100%\) are cut by --max-length 300"):
        classifier = fitted(model, texts(140, after=200))
    lengths = {way.max_length for way in [*classifier.outcome_.tries, *classifier.outcome_.dropped]}
    assert lengths == {0, 256, 300}


class Longer(MadeUp):
    """Such a bench whose texts are cut at 128, 256 or 512 tokens, where passes take one, two or four times as long."""

    def __init__(self, rows, time, right):
        super().__init__(rows, time, right)
        self.latest, self.next_length, self.read = self._read(128), 256, []

    def _read(self, length):
        return SimpleNamespace(seconds=length / 128, kind=SimpleNamespace(max_length=length))

    def slowness(self, which):
        return max(which.max_length, 128) / 128

    def read_longer(self, length):
        self.read.append(length)
        self.latest, self.next_length = self._read(self.next_length), 512 if self.next_length == 256 else 0
        self.time[0] += self.latest.seconds
        return True


def raced(monkeypatch, budget, scores, folder=None):
    """The outcome of a race whose probes and fine-tuning are as often right as the scores of their length."""
    time = [0.0]
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: time[0]))
    rows = Rows.checked(*GIVEN)
    bench = Longer(rows, time, lambda which: scores[which.max_length] + 0.1 * (not which.is_probe))
    return Race(bench, rows, Clock(budget, lambda text: None), 0, folder).run(), bench


def tuned(outcome):
    """The ways of fine-tuning of a race."""
    return [way for way in outcome.since if not way.is_probe]


@pytest.mark.parametrize(
    ("scores", "read", "chosen"),
    [
        ({0: 0.6, 256: 0.7, 512: 0.85}, [256, 512], 512),
        ({0: 0.6, 256: 0.85, 512: 0.7}, [256, 512], 256),
        ({0: 0.7, 256: 0.6, 512: 0.9}, [256], 0),  # nothing is gained by more, so that still more is not read
    ],
)
def test_fine_tuning_takes_the_length_of_the_best_probe(scores, read, chosen, monkeypatch):
    outcome, bench = raced(monkeypatch, 500, scores)
    assert bench.read == read
    assert outcome.best.max_length == chosen
    assert {way.max_length for way in tuned(outcome)} == {chosen}
    assert {way.max_length for way in [*outcome.tries, *outcome.dropped]} == {0, *read}  # the promise counts them


@pytest.mark.parametrize(("budget", "length"), [(900, 512), (300, 256), (100, 0)])
def test_fine_tuning_takes_a_shorter_length_where_time_would_shorten_it(budget, length, monkeypatch):
    outcome, _ = raced(monkeypatch, budget, {0: 0.6, 256: 0.7, 512: 0.9})
    assert {way.max_length for way in tuned(outcome)} == {length}
    assert (outcome.best.max_length, outcome.best.is_probe) == (512, length < 512)


def test_a_gain_within_a_standard_error_counts(monkeypatch):
    seen, entrants = [], Race._entrants

    def watched(race, probe):
        seen.append((probe, [*race.alive], race.scores(race.alive)))
        return entrants(race, probe)

    monkeypatch.setattr(Race, "_entrants", watched)
    raced(monkeypatch, 900, {0: 0.7, 256: 0.72, 512: 0.71})
    probe, alive, scores = seen[0]
    best = max(scores)
    assert probe == alive[int(np.argmax(scores))]
    assert probe.max_length == 256 == alive[0].max_length
    assert best - max(score for way, score in zip(alive, scores, strict=True) if way.max_length == 0) < 0.03


def test_texts_that_there_is_no_time_to_read_are_cut_with_a_warning(monkeypatch):
    with pytest.warns(
        AttnRegWarning, match=r"cut at 128 tokens: there is no time to read more of them\. Give a larger --budget"
    ):
        outcome, bench = raced(monkeypatch, 14, {0: 0.6, 256: 0.9, 512: 0.9})
    assert bench.read == []
    assert outcome.best.max_length == 0


@pytest.mark.parametrize(("name", "says"), [("read_longer", 1), ("has_memory_for", 0)])
def test_where_memory_is_short_texts_stay_shorter(name, says, monkeypatch, tmp_path):
    """For reading, or only for fine-tuning, which takes more."""
    monkeypatch.setattr(Longer, name, lambda self, given: isinstance(given, Try) and not given.max_length)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome, _ = raced(monkeypatch, 900, {0: 0.6, 256: 0.7, 512: 0.9}, tmp_path)
    assert ["to read more of them failed. Give --max-length." in str(each.message) for each in caught] == [True] * says
    assert {way.max_length for way in tuned(outcome)} == {0}
    assert outcome.best.max_length == (0 if says else 512)


def test_a_step_that_memory_does_not_suffice_for_is_told(model, monkeypatch):
    bench = tiny_bench(model)
    bench.device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(tries, "in_order", lambda rows, size, kind, device: in_order(rows, size, kind, CPU))
    bench.encoded[256] = bench.encoded[0]
    assert bench.has_memory_for(Try(1, 1e-3, max_length=256))

    def out_of_memory(method, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FineTuning, "step", out_of_memory)
    assert not bench.has_memory_for(Try(1, 1e-3, max_length=256))
    assert bench.has_memory_for(Try(1, 1e-3))  # without it, there is no fit
    monkeypatch.setattr(Bench, "_read", lambda *given: out_of_memory(None, None))
    assert not bench.read_longer(256)


def test_probes_count_in_the_time_for_more_tokens(monkeypatch):
    """Their training at 128 tokens takes as long as nearly all that may be spent on more tokens."""
    out_of_fold = Longer.out_of_fold

    def slow(self, which, *given):
        self.time[0] += 0.9 if which.is_probe else 0.0  # 15 times at a length
        return out_of_fold(self, which, *given)

    monkeypatch.setattr(Longer, "out_of_fold", slow)
    with pytest.warns(AttnRegWarning, match="no time to read more"):
        outcome, bench = raced(monkeypatch, 90, {0: 0.6, 256: 0.7, 512: 0.9})
    assert bench.read == []
    assert outcome.best.max_length == 0


def test_the_report_says_what_fine_tuning_with_more_tokens_takes(monkeypatch):
    outcome, _ = raced(monkeypatch, 300, {0: 0.6, 256: 0.7, 512: 0.9})
    says = re.fullmatch(
        "A linear probe of 512 tokens was better than fine-tuning of fewer tokens; fine-tuning of 512 needs a budget "
        r"above (\d+) min here\.",
        outcome.ended,
    )
    enough, _ = raced(monkeypatch, 60 * int(says[1]) + 30, {0: 0.6, 256: 0.7, 512: 0.9})
    assert {way.max_length for way in tuned(enough)} == {512}


@pytest.mark.parametrize(("budget", "length"), [(900, 512), (300, 256), (100, 0)])
def test_a_race_that_goes_on_has_its_lengths_again(budget, length, monkeypatch, tmp_path):
    scores = {0: 0.6, 256: 0.7, 512: 0.9}
    before, _ = raced(monkeypatch, budget, scores, tmp_path)
    monkeypatch.setattr(race, "_SLOWER", 1e6)  # as on a machine that is too slow for more tokens
    monkeypatch.setattr(Longer, "seconds", 0.001)  # and has become faster then
    after, bench = raced(monkeypatch, budget, scores, tmp_path)
    assert bench.read == [256, 512]
    assert {way.max_length for way in tuned(before) + tuned(after)} == {length}
    assert tuned(after)[0] == tuned(before)[0]
