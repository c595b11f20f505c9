"""Try every provider on every model family: ``python -m tests.families`` writes docs/providers/families.md.

``python -m tests.families --smallest`` prints the page for two families and three providers.

A pair works if a training step under the provider drops something, changes the model's output and gives finite
gradients, and if the model in eval mode is bitwise the plain one.
"""

import sys
from collections import defaultdict

import torch

import attnreg
from tests.helpers.cases import MODELS, output
from tests.helpers.provider_cases import PROVIDERS
from tests.helpers.repository import ROOT

NAMES = {"bert": "BERT", "roberta": "RoBERTa", "electra": "ELECTRA", "albert": "ALBERT", "distilbert": "DistilBERT"}
NAMES |= {"deberta-v2": "DeBERTa-v2/v3", "modernbert": "ModernBERT", "marian": "Marian (OPUS-MT)", "bart": "BART"}
NAMES |= {"t5": "T5", "gpt2": "GPT-2", "llama": "Llama", "vit": "ViT", "torch-encoder": "`nn.TransformerEncoder`"}
INTRODUCTION = """# Every regularizer on fourteen families

Made by `python -m tests.families`: a training step of a tiny model must change the output or the loss, drop something, and give
finite gradients; in eval mode the model must be bitwise the plain one.

The families: {families}.
"""


def attempt(case, provider_case):
    """Return ``None`` if the pair works, otherwise the reason why it does not."""
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
    if same is provider_case.changes_output or any(rates.values()) is not provider_case.drops:
        return "nothing is dropped"
    if not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
        return "gradients are not finite"
    return None


def table(families, providers):
    """Return the text of the page: the regularizers that work with all families, and what the others do not work with."""
    whole, partly = [], defaultdict(list)
    kinds = [type(case.make(MODELS[0].build())).__name__ for case in providers]
    for provider_case, kind in zip(providers, kinds, strict=True):
        name = kind if kinds.count(kind) == 1 else f"{kind} ({provider_case.name})"
        failed = defaultdict(list)
        for case in families:
            reason = attempt(case, provider_case)
            if reason is not None:
                reason = reason.replace(type(case.build()).__name__, "the model").replace(kind, "the regularizer")
                failed[reason].append(NAMES[case.name])
        for reason, names in failed.items():
            partly[f"{', '.join(names)} | {reason}"].append(f"`{name}`")
        whole += [] if failed else [f"`{name}`"]
    introduction = INTRODUCTION.format(families=", ".join(NAMES[case.name] for case in families))
    lines = [f"| {', '.join(names)} | {rest} |" for rest, names in partly.items()]
    head = ["", "| regularizer | not with | why |", "| --- | --- | --- |"]
    return "\n".join([introduction, f"With all of them: {', '.join(whole)}.", *head, *lines, ""])


if __name__ == "__main__":
    named = [case for case in MODELS if case.name in NAMES]
    if "--smallest" in sys.argv[1:]:
        print(table(named[:2], PROVIDERS[:3]))
    else:
        (ROOT / "docs" / "providers" / "families.md").write_text(table(named, PROVIDERS), encoding="utf-8")
