"""Attached models under FSDP2: `attach`, then `fully_shard`."""

from functools import partial

import pytest
import torch

from tests.helpers.provider_cases import PROVIDERS
from tests.helpers.repository import ROOT, run_script

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import attnreg
from tests.helpers.trainers import bert

folder, method = sys.argv[1:]
rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
model = bert(0.0)
provider = attnreg.AttributionProvider(p=0.5, q=1.0, method=method, steps=3)  # q = 1 leaves nothing to chance
handle = attnreg.attach(model, provider)
if processes > 1:
    dist.init_process_group("gloo")
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(0)
losses, attributions = [], []
for _ in range(3):
    batch = {"input_ids": torch.randint(1, 40, (8, 6), generator=generator), "labels": torch.randint(2, (8,), generator=generator)}
    batch = {name: rows.chunk(processes)[rank] for name, rows in batch.items()}
    provider.attribute(model, batch)
    attributions.append(dict(provider.attributions))
    loss = model(**batch).loss
    loss.backward()
    assert all(rate > 0 for rate in handle.drop_rates().values()), handle.drop_rates()
    optimizer.step()
    optimizer.zero_grad()
    handle.step()
    losses.append(loss.item())
weights = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.state_dict().items()}
found = {"losses": torch.tensor(losses), "attributions": attributions, "weights": weights}
torch.save(found, f"{folder}/{processes}-{rank}.pt")
if processes > 1:
    handle.detach()
    try:
        attnreg.attach(model, attnreg.AttentionDropout(0.1))
    except ValueError as error:
        print(error)
    dist.destroy_process_group()
"""


EVERY = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import attnreg
from attnreg.regularizer.abilities import effects, that_look_at_batches
from tests.helpers.provider_cases import PROVIDERS
from tests.helpers.trainers import bert

def loss(output, batch):
    return output.loss

dist.init_process_group("gloo")
for case in PROVIDERS:
    model = bert()
    provider = case.make(model)
    if case.name == "learnable":
        provider.loss = loss
    if case.name == "block-layerdrop":
        provider = attnreg.LayerDrop(0.5)  # other blocks in each process
    handle = attnreg.attach(model, provider)
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    rates = []
    for _ in range(4):
        batch = {"input_ids": torch.randint(2, 40, (4, 6)), "labels": torch.randint(2, (4,))}
        if that_look_at_batches(provider):
            provider.attribute(model, batch)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.step()
        rates += handle.drop_rates().values()
    assert max(rates) > 0 or effects(provider), case
    print("trained under", case)
dist.destroy_process_group()
"""


def test_every_provider_trains(warm, tmp_path):
    code, output = warm.run("-c", EVERY, cwd=tmp_path, timeout=200, processes=2)
    assert code == 0, output
    assert output.count("trained under") == 2 * len(PROVIDERS)


@pytest.mark.parametrize("method", ["gradient", "integrated_gradients"])
def test_ad_drop_is_that_of_the_unsharded_model(warm, tmp_path, method):
    for processes in (1, 2):
        code, output = warm.run("-c", TRAIN, tmp_path, method, cwd=tmp_path, timeout=200, processes=processes)
        assert code == 0, output
    assert "is already sharded. Attach first, then shard (`fully_shard`)" in output
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close((first["losses"] + second["losses"]) / 2, alone["losses"])
    for step, both in enumerate(zip(first["attributions"], second["attributions"], strict=True)):
        for label, attribution in alone["attributions"][step].items():
            largest = attribution.abs().max()
            close(torch.cat([each[label] for each in both]) / largest, attribution / largest)
    for name, weight in alone["weights"].items():
        close(first["weights"][name], weight)
        assert torch.equal(first["weights"][name], second["weights"][name])


def test_the_block_runs(warm, tmp_path):
    output = run_script(warm, ROOT / "docs/trainer.md", "sharded.py", cwd=tmp_path, processes=2)
    assert output.count("encoder.1") == 2
