"""Count the Python frames and C calls that a regularizer adds to each layer of a forward pass of BERT.

Usage: python benchmarks/frames.py [--names]

They are counted by `sys.setprofile`, with SDPA and padding, and follow neither the machine nor its load. With
`--names`, also the functions that are called most.
"""

from __future__ import annotations

import argparse
import collections
import sys
from types import FrameType
from typing import Any

import torch
import transformers as hf

import attnreg

PROVIDERS = {
    "AttentionDropout, scores": lambda: attnreg.AttentionDropout(0.1, placement="scores"),
    "AttentionDropout, weights": lambda: attnreg.AttentionDropout(0.1),
    "DropHead": lambda: attnreg.DropHead(0.1),
    "DropKey, shared queries": lambda: attnreg.DropKey(0.1, share_queries=True),
    "TokenDropout": lambda: attnreg.TokenDropout(0.1),
    "DropHead & DropKey": lambda: attnreg.DropHead(0.1) & attnreg.DropKey(0.1),
    "HiddenDropout": lambda: attnreg.HiddenDropout(0.1),
}


def calls(layers: int, provider: attnreg.Regularizer | None) -> collections.Counter[str]:
    """Count what one forward pass calls, after two that warm up."""
    config = hf.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=32
    )
    model = hf.BertModel(config).train()
    ids = torch.randint(1, 50, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    if provider is not None:
        attnreg.attach(model, provider)
    counts: collections.Counter[str] = collections.Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            counts[f"{code.co_filename.rpartition('site-packages/')[2]}:{code.co_qualname}"] += 1
        elif event == "c_call":
            counts[f"C {getattr(argument, '__qualname__', argument)}"] += 1

    for warm in (True, True, False):
        sys.setprofile(None if warm else note)
        model(input_ids=ids, attention_mask=mask)
        sys.setprofile(None)
    return counts


def per_layer(make: Any) -> dict[str, float]:
    """Return the calls of one layer, by name."""
    few, many = (calls(layers, make()) for layers in (2, 6))
    return {name: (many[name] - few[name]) / 4 for name in many if many[name] != few[name]}


def main() -> None:
    """Print a line for each regularizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="also print the functions that are called most")
    options = parser.parse_args()
    plain = per_layer(lambda: None)
    print(f"{'plain':28} {sum(plain.values()):6.0f}")
    for name, make in PROVIDERS.items():
        found = per_layer(make)
        added = {each: count - plain.get(each, 0) for each, count in found.items()}
        ours = sum(count for each, count in added.items() if "attnreg" in each)
        print(f"{name:28} {sum(added.values()):6.0f} added, {ours:.0f} of attnreg", flush=True)
        if options.names:
            for each, count in sorted(added.items(), key=lambda item: -item[1])[:120]:
                print(f"    {count:6.1f} {each}")


if __name__ == "__main__":
    main()
