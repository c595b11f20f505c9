"""No regularizer makes numbers that are no numbers, whatever the rate, the input or the precision."""

import itertools

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from tests.helpers.cases import sample
from tests.helpers.provider_cases import CASES, EXTREME

INPUTS = {
    "one token": ([[3]], [[1]]),
    "one sample all padding": ([[3, 4, 5], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]]),
    "one real token": ([[3, 0, 0], [4, 5, 6]], [[1, 0, 0], [1, 1, 1]]),
}


def bert(implementation, dtype, size=1.0):
    torch.manual_seed(0)
    sizes = {"vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=16, attn_implementation=implementation))
    for name, weight in model.named_parameters():
        if "query" in name or "key" in name:
            weight.data *= size  # scores beyond what the softmax can tell apart
    return model.to(dtype).train()


DTYPES = [torch.float16, torch.bfloat16, torch.float32]
USUAL = [("sdpa", torch.float16, 1.0), ("eager", torch.bfloat16, 300.0)]
ROWS = sample(itertools.product(["sdpa", "eager"], DTYPES, [1.0, 300.0]), lambda *row: row in USUAL)


@pytest.mark.parametrize(("implementation", "dtype", "size"), ROWS, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.role == EXTREME], ids=str)
def test_everything_stays_finite(case, implementation, dtype, size):
    if implementation == "eager" and case.needs_queries:
        return  # refused: tests/test_layerwise.py
    model = bert(implementation, dtype, size)
    provider = case.make(model)
    handle = attnreg.attach(model, provider)
    for ids, mask in INPUTS.values():
        model.zero_grad()
        provider.zero_grad()
        with handle.disabled():
            plain = model(torch.tensor(ids), torch.tensor(mask)).logits
        if not plain.isfinite().all():
            assert (size, dtype) == (300.0, torch.float16)  # the plain model's own scores are too large for it
            continue
        labels = torch.zeros(len(ids), dtype=torch.long)
        batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": labels}
        provider.attribute(model, batch)
        loss = model(**batch).loss
        penalty = provider.penalty()
        (loss if penalty is None else loss + penalty).backward()
        rates = handle.drop_rates()
        assert loss.isfinite()
        for weight_name, weight in [*model.named_parameters(), *provider.named_parameters()]:
            assert weight.grad is None or weight.grad.isfinite().all(), weight_name
        assert all(0 <= rate <= 1 for rate in rates.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_minus_infinity_in_the_bias(dtype):
    query, key, value = (torch.randn(2, 2, 3, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    bias = torch.zeros(2, 1, 3, 3, dtype=dtype)
    bias[0, :, :, 1:] = -torch.inf
    bias[1, :, 2] = -torch.inf  # a row without a key
    valid = bias > -torch.inf
    for keep in (torch.zeros(2, 2, 3, 3, dtype=torch.bool), torch.rand(2, 2, 3, 3) < 0.5):
        out = attnreg.functional.scores_dropout(query, key, value, keep, valid)
        rows = valid.any(-1).expand(2, 2, 3)
        assert out[rows].isfinite().all()
        out[rows].float().sum().backward()
        weights = attnreg.functional.attention_weights(query, key, valid, keep=keep)
        assert weights.isfinite().all()
        assert (weights.masked_select(~valid.expand_as(weights)) == 0).all()
    assert all(x.grad.isfinite().all() for x in (query, key, value))
