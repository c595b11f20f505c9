"""Prompt tuning of peft: its further tokens have no label, no score, and no number of their own."""

import types

import peft
import pytest
import torch
import transformers as hf

import attnreg
from attnreg.attendout.rewards import negative_loss
from attnreg.attribution import Target
from attnreg.training import CrossEntropy, FineTuning, R3FLoss, RDropLoss, adamw
from tests.helpers.cases import SMALL

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft
IDS = torch.randint(1, 9, (3, 8), generator=torch.Generator().manual_seed(0))


def llama(dropout=0.0):
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=50, num_key_value_heads=4, attention_dropout=dropout))


def tuned(model):
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def test_prompt_tokens_of_peft_have_no_score():
    model = tuned(llama())
    labels = IDS.masked_fill(torch.arange(8) < 5, -100)
    output = model(input_ids=IDS, labels=labels)
    for kind in ("predicted", "label"):
        classes = Target(kind).for_model(model).classes(output, {"input_ids": IDS, "labels": labels})
        where = torch.arange(11).expand(3, -1)
        assert torch.equal(classes != -100, (where >= 7) & (where < 10))  # 3 more, and one earlier
        if kind == "label":
            assert torch.equal(classes[:, 7:10], IDS[:, 5:])


@pytest.mark.parametrize("case", ["r-drop", "r3f", "cross-entropy", "reward", "micro-batches"])
def test_prompt_tokens_of_peft_have_no_label(case):
    model = tuned(llama(0.0 if case == "micro-batches" else 0.3).double()).double()
    batch = {"input_ids": IDS, "labels": IDS.masked_fill(torch.arange(8) < 2, -100)}
    uneven = {"input_ids": IDS, "labels": IDS.masked_fill(torch.arange(8) < torch.tensor([[0], [6], [3]]), -100)}
    if case in ("cross-entropy", "reward"):  # those of the model itself
        model.eval().requires_grad_(False)
        output = model(**batch)
        found = CrossEntropy(model)(output, batch) if case == "cross-entropy" else -negative_loss(model, batch).mean()
        assert float(found) == pytest.approx(float(output.loss), rel=1e-6)
        return
    if case == "micro-batches":
        whole = [float(FineTuning(model, adamw(model, 0.0), micro_batches=n).step(uneven).loss) for n in (1, 2)]
        assert whole[0] == pytest.approx(whole[1], rel=1e-6)
        return
    method = FineTuning(model, adamw(model, 0.0), objective={"r-drop": RDropLoss(1.0), "r3f": R3FLoss(1.0)}[case])
    logits = []
    hook = model.get_base_model().register_forward_hook(lambda module, args, output: logits.append(output.logits))
    loss = float(method.step(batch).loss)
    hook.remove()
    log_p, log_q = (each[:, 4:10].detach().log_softmax(-1) for each in logits)  # what predicts the last six of 11
    gap = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1).mean() / 2
    of_pass = [-torch.gather(each, 2, IDS[:, 2:, None]).mean() for each in (log_p, log_q)]
    expected = (of_pass[0] + of_pass[1] + gap) / 2 if case == "r-drop" else of_pass[0] + 2 * gap
    assert loss == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", ["predicted", "label"])
def test_class_labels_under_prompt_tuning_are_not_padded(kind):
    target = Target(kind)
    target._model = torch.nn.Linear(1, 1)
    target._model.active_peft_config = types.SimpleNamespace(num_virtual_tokens=2)
    assert target.classes(torch.eye(3)[:2], {"labels": torch.tensor([[0], [1]])}).flatten().tolist() == [0, 1]


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients", "random"])
def test_prompt_tuning_after_attaching(method):
    model, provider = llama().train(), attnreg.AttributionProvider(p=0.5, q=1.0, method=method)
    handle = attnreg.attach(model, provider)
    wrapped = tuned(model).train()
    batch, other = ({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in (IDS, IDS + 1))
    for _ in range(2):
        provider.attribute(wrapped, batch)
        wrapped(**batch).loss.backward()
        assert min(handle.drop_rates().values()) > 0.2
        handle.step()
    if method != "random":
        provider.attribute(wrapped, batch)
        with pytest.raises(ValueError, match="not on the batch that `attribute` looked at"):
            wrapped(**other)
