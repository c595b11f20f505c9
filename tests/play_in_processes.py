"""What ``test_distributed.py`` runs in one process and in two: AttendOut's game, with nothing left to chance."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from attnreg.attendout.decisions import Decisions
from attnreg.training import AttackerDefender, Reinforce, Rewards, Rounds


class SureOfItself(Decisions):
    """Drops what it would rather drop than the average."""

    asked = 0

    def draw(self, logits, units):
        SureOfItself.asked += 1
        return logits > logits.mean((-1, -2), keepdim=True) - 1e-4


class Sure(attnreg.GNetProvider):
    """Leaves nothing to chance."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._decisions = SureOfItself("unit", 1, 1)


def batches(number, rows, seed):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(number):
        ids = torch.randint(2, 30, (rows, 6), generator=draw)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[:, 0] > 15).long()}


def main(folder):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    rank, processes = accelerator.process_index, accelerator.num_processes
    generator = Sure.for_model(model)
    generator.calibrate(next(batches(1, 8, seed=2)))  # on whole batches: the game would only see this process's rows
    game = AttackerDefender(
        model,
        generator,
        lambda network: torch.optim.AdamW(network.parameters(), lr=1e-3),
        credit=Reinforce(
            reward="gap", optimizer_factory=lambda network: torch.optim.SGD(network.parameters(), lr=1e-1)
        ),
        rewards=Rewards(list(batches(3, 8, seed=1))),
        rounds=Rounds(steps=2, winner="greedy"),
        accelerator=accelerator,
    )
    steps = []
    for batch in batches(8, 8, seed=2):
        result = game.step({name: tensor[rank::processes] for name, tensor in batch.items()})
        steps.append({**{name: float(value) for name, value in result.logs.items()}, **result.events})
    assert SureOfItself.asked == 8
    record = {
        "steps": steps,
        "generator": [parameter.double().sum().item() for parameter in game.generator.parameters()],
        "attacker": [parameter.double().sum().item() for parameter in game.model.parameters()],
        "moves": game.state_dict()["moves"],
    }
    (Path(folder) / f"{processes}-{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1])
