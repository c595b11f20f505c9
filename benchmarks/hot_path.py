"""What a masked training step costs on a GPU, at sizes that people train at, in times of the plain step.

Usage: python benchmarks/hot_path.py [--rounds N] [--only TEXT] [--shapes TEXT]
       python benchmarks/hot_path.py --device cpu --tiny      # the same output at a tiny size

Arms are interleaved. Wall time is the median of the rounds; GPU time is the sum of all kernels of one step; memory is
the peak of a step. Kernels are compiled first, by several processes that share Triton's cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import attnreg

Arm = tuple[str, Callable[[], attnreg.Regularizer] | None]
ARMS: dict[str, Callable[[], attnreg.Regularizer] | None] = {
    "plain": None,
    "AttentionDropout, scores": lambda: attnreg.AttentionDropout(0.1, placement="scores"),
    "AttentionDropout, weights": lambda: attnreg.AttentionDropout(0.1),
    "DropHead": lambda: attnreg.DropHead(0.1),
    "DropKey, shared queries": lambda: attnreg.DropKey(0.1, share_queries=True),
    "TokenDropout": lambda: attnreg.TokenDropout(0.1),
    "HiddenDropout": lambda: attnreg.HiddenDropout(0.1),
    "LayerDrop": lambda: attnreg.LayerDrop(0.0),
    "DropHead & DropKey": lambda: attnreg.DropHead(0.1) & attnreg.DropKey(0.1),
    "own dropout, seeded": None,
    "own dropout, torch's": None,
    "AD-DROP": lambda: attnreg.AttributionProvider(p=0.3, q=0.3),
}
LONG = "AttentionDropout, scores", "AttentionDropout, weights", "DropHead", "plain"


def bert(batch: int, tokens: int, device: str, tiny: bool, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return BERT-base and a padded batch."""
    small: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    options = small if tiny else {}
    config = hf.BertConfig(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **options)
    with torch.device(device):
        model = hf.BertForSequenceClassification(config)
        lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1))
        lengths[0] = tokens
        inputs = {
            "input_ids": torch.randint(0, config.vocab_size, (batch, tokens)),
            "attention_mask": (torch.arange(tokens) < lengths).long(),
            "labels": torch.randint(0, 2, (batch,)),
        }
    return model, inputs


def llama(
    batch: int, tokens: int, device: str, tiny: bool, *, padded: bool = False, layers: int = 16
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a Llama of 1B weights with LoRA in bfloat16, and a batch."""
    from peft import LoraConfig, get_peft_model

    big: Any = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192}
    small: Any = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    sizes = {**(small if tiny else big), "num_hidden_layers": 2 if tiny else layers, "max_position_embeddings": 8192}
    config = hf.LlamaConfig(vocab_size=32000, use_cache=False, **sizes)
    torch.set_default_dtype(torch.bfloat16 if device != "cpu" else torch.float32)
    with torch.device(device):
        model = hf.LlamaForCausalLM(config)
        ids = torch.randint(0, config.vocab_size, (batch, tokens))
        lengths = torch.randint(tokens // 4, tokens + 1, (batch, 1))
        mask = (torch.arange(tokens) < lengths).long()
    torch.set_default_dtype(torch.float32)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    wrapped: Any = get_peft_model(model, lora, autocast_adapter_dtype=False)
    inputs = {"input_ids": ids, "labels": ids, **({"attention_mask": mask} if padded else {})}
    return wrapped, inputs


SHAPES: dict[str, Callable[[str, bool], tuple[nn.Module, dict[str, Tensor]]]] = {
    "BERT-base 32 x 128": lambda device, tiny: bert(2 if tiny else 32, 16 if tiny else 128, device, tiny),
    "BERT-base 32 x 512": lambda device, tiny: bert(2 if tiny else 32, 24 if tiny else 512, device, tiny),
    "Llama LoRA 4 x 1024": lambda device, tiny: llama(2 if tiny else 4, 16 if tiny else 1024, device, tiny),
    "Llama LoRA 4 x 1024 padded": lambda device, tiny: llama(
        2 if tiny else 4, 16 if tiny else 1024, device, tiny, padded=True
    ),
    "Llama, 4 layers, 1 x 8192": lambda device, tiny: llama(1, 32 if tiny else 8192, device, tiny, layers=4),
}


class Steps:
    """Training steps of one model, under any arm."""

    def __init__(self, shape: str, device: str, *, tiny: bool) -> None:
        torch.manual_seed(0)
        self.device, self.on_gpu = device, device != "cpu"
        self.model, self.batch = SHAPES[shape](device, tiny)
        self.model.train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=self.on_gpu)
        self.casts = "BERT" in shape and self.on_gpu
        self.handle: Any = None
        self.provider: Any = None
        self.dropouts = [m for m in self.model.modules() if isinstance(m, nn.Dropout)]

    def enter(self, name: str) -> None:
        """Attach what an arm needs."""
        own = name.startswith("own dropout")
        for each in self.dropouts:
            each.p = 0.1 if own else 0.0
        make = ARMS[name]
        self.provider = None if make is None else make()
        if make is not None:
            self.handle = attnreg.attach(self.model, self.provider)
        elif name == "own dropout, seeded":
            self.handle = attnreg.seeded(self.model)

    def leave(self) -> None:
        """Detach it."""
        if self.handle is not None:
            self.handle.detach()
        self.handle = None

    def step(self) -> None:
        """Make one training step."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.casts):
            if self.provider is not None and self.provider.looks_at_batches:
                self.provider.attribute(self.model, self.batch)
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.handle is not None:
            self.handle.step()

    def timed(self) -> tuple[float, float]:
        """Return the seconds of a step and the peak of its memory in MiB."""
        if not self.on_gpu:
            begin = time.perf_counter()
            self.step()
            return time.perf_counter() - begin, 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin, torch.cuda.max_memory_allocated() / 2**20

    def on_device(self) -> tuple[float, int]:
        """Return the milliseconds of all kernels of one step, and their number."""
        if not self.on_gpu:
            return 0.0, 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return sum(e.device_time_total for e in events) / 1e3, len(events)


def measure(shape: str, names: list[str], options: argparse.Namespace) -> None:
    """Print the rows of one shape."""
    steps = Steps(shape, options.device, tiny=options.tiny)
    times: dict[str, list[float]] = {name: [] for name in names}
    memory, kernels = dict.fromkeys(names, 0.0), {}
    warm, rounds = (1, 1) if options.tiny else (2, options.rounds)
    for round_ in range(-warm, rounds):
        for name in list(names):
            try:
                steps.enter(name)
                if round_ == -warm:
                    steps.step()
                seconds, peak = steps.timed()
                if round_ == 0:
                    kernels[name] = steps.on_device()
            except Exception as error:  # the others are measured all the same
                print(f"| {shape} | {name} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
                names.remove(name)
                continue
            finally:
                steps.leave()
                steps.optimizer.zero_grad()
            if round_ >= 0:
                times[name].append(seconds)
                memory[name] = max(memory[name], peak)
    base = statistics.median(times["plain"])
    for name in names:
        (on_gpu, launches), (plain_gpu, plain_launches) = kernels[name], kernels["plain"]
        seconds, peak = statistics.median(times[name]), memory[name]
        cells = [f"{seconds / base:.2f}", f"{seconds * 1e3:.1f} ms", f"{on_gpu / max(plain_gpu, 1e-9):.2f}"]
        cells += [f"{on_gpu:.1f} ms", f"{launches - plain_launches:+d}"]
        cells += [f"{peak / max(memory['plain'], 1e-9):.3f}", f"{peak:.0f} MiB"]
        print(f"| {shape} | {name} | {' | '.join(cells)} |", flush=True)


def compiled(options: argparse.Namespace) -> None:
    """Compile the kernels of all arms in several processes."""
    begin = time.perf_counter()
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, "--device", options.device, "--warm", f"{shape}|{name}"],
            stdout=subprocess.DEVNULL,
        )
        for shape in ("BERT-base 32 x 128", "Llama LoRA 4 x 1024", "Llama LoRA 4 x 1024 padded")
        for name in ("AttentionDropout, scores", "AttentionDropout, weights", "DropKey, shared queries", "TokenDropout")
    ]
    failed = [job.wait() for job in jobs]
    print(f"kernels compiled in {time.perf_counter() - begin:.0f} s{' FAILED' if any(failed) else ''}", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only arms whose name contains this text")
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this text")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm", help="compile the kernels of one arm")
    options = parser.parse_args()
    if options.warm:
        shape, name = options.warm.split("|")
        small = Steps(shape, options.device, tiny=False) if options.tiny else _small(shape, options.device)
        small.enter(name)
        small.step()
        return
    if options.device != "cpu":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
        compiled(options)
    print("| shape | step | time | | GPU time | | launches | memory | |\n|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        names = [name for name in ARMS if name == "plain" or options.only in name]
        names = [name for name in names if "8192" not in shape or name in LONG]
        names = [name for name in names if "Llama" not in shape or "own" not in name]
        names = [name for name in names if "BERT" in shape or name != "AD-DROP"]
        if options.shapes in shape:
            measure(shape, names, options)


def _small(shape: str, device: str) -> Steps:
    """Return steps of two layers of a shape, whose kernels are those of all."""
    before = SHAPES[shape]
    if "Llama" in shape:
        SHAPES[shape] = lambda device, tiny: llama(1, 256, device, tiny, padded="padded" in shape, layers=1)
    steps = Steps(shape, device, tiny=False)
    SHAPES[shape] = before
    return steps


if __name__ == "__main__":
    main()
