"""RegularizedTrainer on top of other Trainers: every kind of regularizer acts in each of them, or is refused."""

import pytest
import torch

import attnreg
from attnreg.errors import InputError
from attnreg.integrations import RegularizedTrainer
from tests.helpers.method_cases import weights
from tests.helpers.trainer_cases import KINDS, made
from tests.helpers.trainers import QUIET, dpo, sentences, seq2seq, sft

pytestmark = QUIET
REFUSED = {
    ("sft", "objective"): "R-Drop needs `logits` with gradients in the output of LlamaForCausalLM, which has none",
    ("sentences", "objective"): "R-Drop needs `logits` with gradients in the output of SentenceTransformer",
    ("sentences", "two passes"): r"Expected the batch to be a dict of arguments of SentenceTransformer.forward\(input\)",
    ("dpo", "objective"): "R-Drop needs `logits`",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("start", [seq2seq, sft, dpo, sentences])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_acts_or_is_refused(tmp_path, tiny_models, start, kind):
    base, given = start(tmp_path, tiny_models, max_steps=4)
    plain = base(**given)
    plain.train()
    base, given = start(tmp_path, tiny_models, max_steps=4)
    both = type("Both", (RegularizedTrainer, base), {})
    options = made(kind)
    if (start.__name__, kind) in REFUSED:
        with pytest.raises((InputError, RuntimeError), match=REFUSED[start.__name__, kind]):
            both(**given, **options).train()
        return
    if kind == "learned":
        model = given["model"][0].auto_model if start is sentences else given["model"]
        options["provider"] = attnreg.ConcreteDropout.for_model(model, 0.2)
    trainer = both(**given, **options)
    before = [each.detach().clone() for each in options["provider"].parameters()]
    trainer.train()
    assert not torch.equal(weights(trainer.model), weights(plain.model))
    assert not any(map(torch.equal, before, options["provider"].parameters()))
