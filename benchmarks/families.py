"""Every provider on every model family, tried: ``python benchmarks/families.py`` writes docs/providers/families.md.

A pair works if a training step under the provider drops something, changes what the model computes, and gives finite
gradients, and if the model is the plain one again in eval mode.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import attnreg  # noqa: E402
from tests.cases import MODELS, output  # noqa: E402
from tests.provider_cases import PROVIDERS  # noqa: E402

NAMES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "electra": "ELECTRA",
    "albert": "ALBERT",
    "distilbert": "DistilBERT",
    "deberta-v2": "DeBERTa-v2, v3",
    "modernbert": "ModernBERT",
    "marian": "Marian (OPUS-MT)",
    "bart": "BART",
    "t5": "T5",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "vit": "ViT",
    "torch-encoder": "`nn.TransformerEncoder`",
}
INTRODUCTION = """# Every provider on fourteen families

Every provider on every family, made by `python benchmarks/families.py`: a training step of a tiny model under the
provider must drop something, change what is computed and give finite gradients, and in eval mode the model must be
bitwise the plain one. `CrossTuning` works where its provider does.
✓ works; a letter says why it does not.
"""


def attempt(case, provider_case):
    """``None`` if the pair works, otherwise why it does not."""
    model, batch = case.build(), case.batch()
    with torch.no_grad():
        plain = output(model.eval(), batch)
    try:
        provider = provider_case.make(model)
        with attnreg.attach(model.train(), provider) as handle:
            with torch.no_grad():
                if not torch.equal(output(model.eval(), batch), plain):
                    return "differs in eval mode"
            model.train()
            provider.attribute(model, batch)
            torch.manual_seed(1)
            out = output(model, batch)
            out.square().sum().backward()
            rates = handle.drop_rates()
            with handle.disabled():
                torch.manual_seed(1)
                same = torch.equal(output(model, batch), out)
    except (ValueError, RuntimeError) as error:
        return " ".join(str(error).split())
    if same or not any(rates.values()):
        return "nothing is dropped"
    if not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
        return "gradients that are not finite"
    return None


def table():
    """The page."""
    families = [case for case in MODELS if case.name in NAMES]
    reasons = {}
    lines = [
        "| provider | " + " | ".join(NAMES[case.name] for case in families) + " |",
        "| --- |" + " :---: |" * len(families),
    ]
    kinds = [type(case.make(MODELS[0].build())).__name__ for case in PROVIDERS]
    for provider_case, kind in zip(PROVIDERS, kinds, strict=True):
        name = kind if kinds.count(kind) == 1 else f"{kind} ({provider_case.name})"
        cells = []
        for case in families:
            reason = attempt(case, provider_case)
            if reason is not None:
                reason = reason.replace(type(case.build()).__name__, "the model").replace(kind, "the provider")
                reason = reasons.setdefault(reason, chr(ord("a") + len(reasons)))
            cells.append(reason or "✓")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    notes = [f"- {letter}: {reason}" for reason, letter in reasons.items()]
    return "\n".join([INTRODUCTION, *lines, "", *notes, ""])


if __name__ == "__main__":
    (ROOT / "docs" / "providers" / "families.md").write_text(table(), encoding="utf-8")
