"""What ``test_method_contract.py`` runs in one process and in two: every method, with nothing left to chance."""

import json
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import attnreg
from attnreg.training import AttackerDefender, FineTuning
from tests.helpers.method_cases import CASES, MethodCase, batches, bert, without_chance


def trained(case, accelerator, provider=None, **options):
    """Train on this process's share of each batch; gives what must be the same in all."""
    model = bert(dropout=0.0, initializer_range=0.5)  # attention matters, so that rewards are no rounding
    before = [parameter.detach().clone() for parameter in model.parameters()]
    torch.manual_seed(accelerator.process_index)
    method = case.make(model, provider, sure=True, accelerator=accelerator, **options)
    rank, processes, steps = accelerator.process_index, accelerator.num_processes, []
    for batch in batches(4 if case.method is AttackerDefender else 2, 8, seed=2):  # the game has two rounds
        result = method.step({name: tensor[rank::processes] for name, tensor in batch.items()})
        logs = {name: float(value) for name, value in result.logs.items()}
        steps.append([float(result.loss), logs, dict(result.events)])
    networks = [*method.networks.values(), *([method.provider] if method.provider is not None else [])]
    sums = [parameter.sum().item() for network in networks for parameter in network.parameters()]
    after = zip(method.model.parameters(), before, strict=True)
    return {"steps": steps, "weights": sums, "moved": sum((new - old).abs().sum().item() for new, old in after)}


def main(folder):
    accelerator = Accelerator(cpu=True)
    records = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_chance(monkeypatch)
        for case in (case for case in CASES if case.sure is not None):
            records[str(case)] = trained(case, accelerator)
            if (
                case.takes_micro_batches
            ):  # each process takes its half of a batch in two parts; a single one, all in one
                parts = accelerator.num_processes
                of_parts = records[str(case)] if parts == 1 else trained(case, accelerator, micro_batches=parts)
                records[f"{case} in parts"] = of_parts
        first = attnreg.AttributionProvider(0.5, 1.0)
        records["AD-DROP"] = trained(MethodCase(FineTuning), accelerator, first)
    name = f"{accelerator.num_processes}-{accelerator.process_index}.json"
    (Path(folder) / name).write_text(json.dumps(records))


if __name__ == "__main__":
    main(sys.argv[1])
