"""Measure how far the log-probabilities that GRPO compares differ before any update, with and without one mask.

Usage: python benchmarks/one_mask.py [--data-dir FOLDER] [--steps N] [--prompts N]
       python benchmarks/one_mask.py --smallest    # a tiny model, to test the script

A Llama (4 layers, hidden size 128, dropout of 0.1 in its attention and its LoRA adapters) learns words of sentences:
of CoLA, if its folder is given, or of the built-in grammar. TRL's GRPOTrainer then continues beginnings of sentences,
with a learning rate of 0, so that only masks can change a probability. Tokens are sampled at temperature 1. Each row
has, of all sampled tokens, the ratio of two probabilities: its standard deviation and largest distance from 1, the
share of tokens outside of 0.8 to 1.2, and the mean of ``ratio - 1 - log(ratio)``, which estimates the KL divergence.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

import attnreg
from attnreg.experiments.tasks import agreement
from attnreg.integrations import AttnRegCallback

P = 0.1
PAD, UNKNOWN, END = range(3)
BEGINNING = 3  # words of a prompt
Make = Callable[[torch.nn.Module], Any]
ARMS: dict[str, Make | None] = {
    "TRL alone": None,
    "one mask, own dropout": attnreg.seeded,
    "one mask, own dropout and `DropKey(0.1)`": lambda model: attnreg.DropKey(P),
}


def sentences_of(folder: str | None) -> list[list[str]]:
    """Return sentences as words."""
    if folder is None:
        texts = [row["sentence"] for row in agreement.corpus("train")]
    else:
        with gzip.open(Path(folder) / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
            texts = [row["sentence"] for row in map(json.loads, lines) if row["label"] == 1]
    split = pre_tokenizers.Whitespace().pre_tokenize_str
    return [[word for word, _ in split(text)] for text in map(str, texts)]


def tokenizer_of(sentences: list[list[str]]) -> hf.PreTrainedTokenizerFast:
    """Make a tokenizer that knows each word of the sentences."""
    words = dict.fromkeys(word for sentence in sentences for word in sentence)
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[END]", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]", padding_side="left"
    )


def policy(rows: list[list[int]], vocabulary: int, steps: int, hidden: int) -> tuple[PeftModel, float]:
    """Train a model with adapters on sentences; return it and its latest losses, averaged."""
    hf.set_seed(0)
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        attention_dropout=P,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    lora = LoraConfig(r=8, lora_dropout=P, target_modules="all-linear")
    model = get_peft_model(hf.LlamaForCausalLM(config), lora).requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        chosen = [rows[index] for index in torch.randint(len(rows), (32,))]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in chosen], batch_first=True)
        mask = (ids != PAD).long()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, sum(losses[-20:]) / len(losses[-20:])


def compared(model: PeftModel, make: Make | None, tokenizer: Any, prompts: list[str], folder: str) -> list[list[Any]]:
    """Run GRPO without learning; return log-probabilities of its tokens in the rollout, old policy and policy."""
    args = GRPOConfig(
        folder,
        learning_rate=0.0,
        per_device_train_batch_size=8,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=12,
        num_train_epochs=1,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        bf16=False,
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )
    if make is not None:
        AttnRegCallback(make(trainer.model), one_mask=True).add_to(trainer)
    trainer.remove_callback(hf.PrinterCallback)
    log_probs, score = trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions
    generate, loss = model.generate, trainer._compute_loss
    latest: dict[str, torch.Tensor] = {}
    found: list[list[Any]] = [[], [], []]

    def sampling(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = generate(*args, **kwargs, return_dict_in_generate=True, output_logits=True)
        logits = torch.stack(out.logits, 1).log_softmax(-1)
        latest["sampled"] = logits.gather(2, out.sequences[:, -logits.shape[1] :, None])[..., 0]
        return out.sequences

    def scoring(inputs: Any) -> dict[str, Any]:
        return score(inputs) | {"sampled": latest["sampled"]}

    def computing(*args: Any, **kwargs: Any) -> Any:
        computed = log_probs(*args, **kwargs)
        latest["new"] = computed[0].detach()
        return computed

    def comparing(model: Any, inputs: Any) -> Any:
        output, real = loss(model, inputs), inputs["completion_mask"].bool()
        for each, values in zip(found, (inputs["sampled"], inputs["old_per_token_logps"], latest["new"]), strict=True):
            each.append(values[real])
        return output

    trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions = computing, scoring
    model.generate, trainer._compute_loss = sampling, comparing
    trainer.train()
    attnreg.detach(trainer.model)
    model.generate = generate
    return found


def line(before: list[torch.Tensor], after: list[torch.Tensor]) -> str:
    """Describe the ratios of two lists of probabilities."""
    log_ratio = (torch.cat(after) - torch.cat(before)).double()
    ratio = log_ratio.exp()
    outside = ((ratio < 0.8) | (ratio > 1.2)).double().mean()
    kl = (ratio - 1 - log_ratio).mean()
    return f"{ratio.std():.2g} | {(ratio - 1).abs().max():.2g} | {100 * outside:.1f} % | {kl:.2g}"


def main() -> None:
    """Measure all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of CoLA")
    parser.add_argument("--steps", type=int, default=1500, help="to train the policy")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--smallest", action="store_true", help="a tiny model, few steps")
    options = parser.parse_args()
    if options.smallest:
        options.steps, options.prompts = 20, 8
    sentences = [words for words in sentences_of(options.data_dir) if len(words) > BEGINNING]
    tokenizer = tokenizer_of(sentences)
    rows = [[*tokenizer.convert_tokens_to_ids(words), END] for words in sentences]
    model, loss = policy(rows, len(tokenizer), options.steps, 32 if options.smallest else 128)
    print(f"{len(rows)} sentences, {len(tokenizer)} words, {options.steps} steps, loss {loss:.2f}\n")
    chosen = torch.randperm(len(sentences))[: options.prompts].tolist()
    prompts = [" ".join(sentences[index][:BEGINNING]) for index in chosen]
    print("| log-probabilities | passes | SD of the ratio | largest distance from 1 | outside 0.8 to 1.2 | KL |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name, make in ARMS.items():
        hf.set_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            sampled, old, new = compared(model, make, tokenizer, prompts, folder)
        print(f"| {name} | old policy, policy | {line(old, new)} |")
        print(f"| {name} | rollout, policy | {line(sampled, new)} |", flush=True)
    print(f"\n{sum(map(len, new))} tokens in the last row.")


if __name__ == "__main__":
    main()
