"""
LoRA on a decoder
=================

A tiny Llama first learns to count upwards. Then only a LoRA adapter of ``peft`` learns to count downwards from few
rows, plainly and with HiddenKey, which was made for this case. Attach to the model that peft returns; only the
adapter's weights get gradients. The picture shows the loss on training rows and on other rows, for one seed of a toy
task: no proof that it helps elsewhere.
"""

import copy

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import attnreg
from attnreg.training import FineTuning, adamw


def counting(rows, step):
    start = torch.randint(0, 20, (rows, 1))
    ids = (start + step * torch.arange(10)) % 20
    # some numbers are wrong, so that there is noise to memorize
    wrong = torch.rand(ids.shape) < 0.2
    ids = torch.where(wrong, torch.randint(0, 20, ids.shape), ids)
    return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
base = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
pretraining = FineTuning(base, adamw(base, 3e-3))
for _ in range(100):
    pretraining.step(counting(32, step=1))

# %%
# Both adapters start equal and see the same rows.
train, dev = counting(16, step=-1), counting(200, step=-1)
lora = LoraConfig(
    task_type="CAUSAL_LM",
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"],
)
curves = {}
for name, provider in {
    "LoRA": None,
    "LoRA and HiddenKey(0.1)": attnreg.HiddenKey(0.1),
}.items():
    torch.manual_seed(1)
    model = get_peft_model(copy.deepcopy(base), lora)
    learned = [weights for weights in model.parameters() if weights.requires_grad]
    method = FineTuning(model, torch.optim.AdamW(learned, lr=1e-2), provider)
    curves[name] = []
    for _ in range(80):
        method.step(train)
        model.eval()
        with torch.no_grad():
            curves[name].append(
                [float(model(**batch).loss) for batch in (train, dev)]
            )
        model.train()
    lowest = min(of_dev for _, of_dev in curves[name])
    print(
        f"{name}: {sum(weights.numel() for weights in learned)} weights learn, lowest loss on other rows {lowest:.2f}"
    )

# %%
# Dashed: training rows. Solid: 200 other rows.
plt.figure(figsize=(7, 4), layout="constrained")
for (name, losses), color in zip(
    curves.items(), ("tab:blue", "tab:orange"), strict=True
):
    of_train, of_dev = zip(*losses, strict=True)
    plt.plot(of_train, color=color, linestyle="--")
    plt.plot(of_dev, color=color, label=name)
plt.xlabel("step")
plt.ylabel("loss, in eval mode")
plt.legend()
plt.show()
