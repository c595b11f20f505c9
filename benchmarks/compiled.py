"""Count the graphs that torch.compile makes of attached models, beside those of the same plain model.

Usage: python benchmarks/compiled.py [--device cpu|cuda] [--backend eager|aot_eager|inductor] [--only TEXT]
       python benchmarks/compiled.py --smallest    # one model, one regularizer, to test the script

Each model makes training passes at several lengths under ``fullgraph=True``, where a graph break is an error, with and
without ``dynamic=True``. How many graphs there are is decided before a backend is asked, so the fastest one is the
default; ``inductor`` also compiles them to code. A model with FlexAttention is not compiled, only its kernel is, always
by Inductor; on a CPU, which has no gradients of it, it makes forward passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from arms import scores, weights
from by_hand import P
from common import DEVICES, hardware
from torch._dynamo.utils import counters

import attnreg

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
LENGTHS = (16, 16, 24, 40)
VOCABULARY = 100


def bert() -> hf.PreTrainedModel:
    """Make a BERT, with dropout."""
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=VOCABULARY, **SIZES))


def llama(attention: str = "sdpa") -> hf.PreTrainedModel:
    """Make a Llama with grouped queries and dropout of attention."""
    sizes = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "use_cache": False}
    dropout = {"attention_dropout": 0.1} if attention == "sdpa" else {}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, attn_implementation=attention, **dropout))


def vit() -> hf.PreTrainedModel:
    """Make a ViT, with dropout."""
    sizes = {**SIZES, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, **sizes))


MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "BERT, SDPA": bert,
    "Llama, SDPA": llama,
    "ViT, SDPA": vit,
    "Llama, FlexAttention": lambda: llama("flex_attention"),
}
REGULARIZERS: dict[str, Callable[[hf.PreTrainedModel], Any]] = {
    "plain": lambda model: None,
    "AttentionDropout, scores": lambda model: attnreg.attach(model, scores(model)),
    "AttentionDropout, weights": lambda model: attnreg.attach(model, weights(model)),
    "DropKey": lambda model: attnreg.attach(model, attnreg.DropKey(P)),
    "AttentionLayerDrop": lambda model: attnreg.attach(model, attnreg.AttentionLayerDrop(0.5)),
    "own dropout, seeded": attnreg.seeded,
}


def batch(name: str, length: int, device: str) -> dict[str, torch.Tensor]:
    """Make a batch of this length; of images, whose length is fixed, one of so many."""
    if name.startswith("ViT"):
        return {
            "pixel_values": torch.ones(length, 3, 32, 32, device=device),
            "labels": torch.zeros(length, device=device).long(),
        }
    ids = torch.arange(3 * length, device=device).view(3, length) % (VOCABULARY - 1) + 1
    return {"input_ids": ids, "labels": ids if name.startswith("Llama") else ids[:, 0] % 2}


def counted(name: str, regularizer: str, device: str, backend: str, dynamic: bool | None) -> str:
    """Return how many graphs are compiled for passes of all lengths."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().to(device).train()
    in_kernel = "Flex" in name
    model.requires_grad_(not in_kernel or device != "cpu")
    handle = REGULARIZERS[regularizer](model)
    counters.clear()
    runs = model if in_kernel else torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in LENGTHS:
        loss = runs(**batch(name, length, device)).loss
        if loss.requires_grad:
            loss.backward()
        if handle is not None:
            assert handle.seed is not None  # it was masked
            handle.step()
    return str(counters["stats"]["unique_graphs"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--only", default="", help="only models whose name contains this text")
    parser.add_argument("--smallest", action="store_true")
    options = parser.parse_args()
    names = [name for name in MODELS if options.only in name][: 1 if options.smallest else None]
    print(f"{hardware(options.device)}, backend {options.backend}, lengths {', '.join(map(str, LENGTHS))}\n")
    print("| model | regularizer | `fullgraph` | `fullgraph`, `dynamic` |\n| --- | --- | ---: | ---: |")
    for name in names:
        for regularizer in list(REGULARIZERS)[: 2 if options.smallest else None]:
            ways = (None,) if "Flex" in name else (None, True)
            graphs = [counted(name, regularizer, options.device, options.backend, dynamic) for dynamic in ways]
            print(f"| {name} | {regularizer} | {' | '.join(graphs)} |" + " |" * (2 - len(graphs)), flush=True)


if __name__ == "__main__":
    main()
