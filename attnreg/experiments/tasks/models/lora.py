"""LoRA: train low-rank adapters of a pretrained model's linear layers, with peft."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from attnreg.errors import InputError, did_you_mean, one_line

ALL = "all-linear"
CONFIG = "adapter_config.json"
# peft's names of tasks, by the head of the model; peft has no names for other heads.
_TASKS = {
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}


def with_lora(
    model: Any,
    head: str,
    new: Collection[str],
    *,
    rank: int,
    targets: str | None = None,
    alpha: int | None = None,
    dropout: float = 0.0,
) -> Any:
    r"""Wrap a pretrained model so that only adapters and new modules train.

    The weight W of an adapted linear layer becomes :math:`W + \frac{\alpha}{r} B A`, with B zero at the start. The
    model of peft changes ``model`` in place.

    Args:
        model: a pretrained model.
        head: its auto class of transformers.
        new: names of the weights that were not pretrained, such as a new head's. Their modules train as a whole.
        rank: r.
        targets: modules to adapt, separated by commas, or ``all-linear`` (default: peft's choice).
        alpha: by default the rank, so that the scale is 1.
        dropout: rate of dropout on the adapters' inputs.

    Reference:
        LoRA (arXiv 2106.09685), Section 4.1.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    names = None if targets is None else [name.strip() for name in targets.split(",")]
    if bare := [name for name in new if "." not in name]:
        raise InputError(f"LoRA cannot train the new weight {bare[0]}, which belongs to no module: remove --lora-rank.")
    layers = (name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)))
    linear, base = sorted({name.rpartition(".")[2] for name in layers}), str(model.name_or_path)
    with _peft() as peft:
        config = peft.LoraConfig(
            task_type=_TASKS.get(head),
            r=rank,
            lora_alpha=rank if alpha is None else alpha,
            lora_dropout=dropout,
            target_modules=ALL if names == [ALL] else names,
            modules_to_save=sorted({name.rpartition(".")[0] for name in new}) or None,
        )
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            none = f"none, and peft has no default for {type(model).__name__}"
            raise _no_such(names[0] if names else none, linear) from error
    adapted_names = adapted.targeted_module_names
    for name in names or ():
        if name != ALL and not any(f".{adapted_name}".endswith(f".{name}") for adapted_name in adapted_names):
            raise _no_such(name, linear)
    # Absolute, so that the adapter finds its model from every folder.
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    return adapted


def adapter_base(folder: str) -> str | None:
    """Return the model that a saved adapter belongs to; ``None`` if the folder holds no adapter."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"Cannot read the adapter in {path}: {error!r}.") from error


def with_adapter(model: Any, folder: str) -> Any:
    """Put a saved adapter on its model."""
    from safetensors import SafetensorError

    try:
        with _peft() as peft:
            return peft.PeftModel.from_pretrained(model, folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"Cannot load the adapter in {folder}: {one_line(error)}") from error


def save_model(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Save a model as transformers does; of a model of peft, the adapter and the model's configuration.

    ``weights`` is the state dict of a sharded model.
    """
    if is_adapted(model):
        # Embeddings are never resized here; to find that out, peft would ask the hub.
        model.save_pretrained(folder, save_embedding_layers=False)
        model.get_base_model().config.save_pretrained(folder)
    else:
        model.save_pretrained(folder, state_dict=weights)


def is_adapted(model: Any) -> bool:
    """Whether a model is one of peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def parameter_counts(model: Any) -> dict[str, int]:
    """Return the number of parameters that train (``trained``) and of all (``all``); peft's backups do not count."""
    kept = [parameter for name, parameter in model.named_parameters() if ".original_module." not in name]
    return {"trained": sum(p.numel() for p in kept if p.requires_grad), "all": sum(p.numel() for p in kept)}


def summary(model: Any) -> str:
    """Say in one sentence what trains in a model of peft."""
    counts, config = parameter_counts(model), model.peft_config["default"]
    targets = sorted({name.rpartition(".")[2] for name in model.targeted_module_names})
    also = f", and {', '.join(sorted(new))}" if (new := saved_modules(model)) else ""
    return (
        f"LoRA trains {counts['trained']} of {counts['all']} parameters ({counts['trained'] / counts['all']:.2%}): "
        f"adapters of rank {config.r} of {', '.join(targets)} in {len(model.targeted_module_names)} modules{also}."
    )


def saved_modules(model: Any) -> set[str]:
    """Return the names of the modules that train and are saved as a whole in a model of peft."""
    parts = (name.partition(".modules_to_save.") for name, _ in model.named_parameters())
    return {name.removeprefix("base_model.model.") for name, sign, _ in parts if sign}


def _no_such(name: str, known: Collection[str]) -> InputError:
    return InputError(
        f"Expected --lora-targets to be linear layers of the model, such as {', '.join(known)}, or {ALL}, got {name}."
        f"{did_you_mean(name, known)}"
    )


@contextmanager
def _peft() -> Iterator[Any]:
    """Import peft; ignore its warnings of what it then does right: transposed weights (GPT-2), a deprecated name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fan_in_fan_out", UserWarning)
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        try:
            import peft
        except ImportError as error:
            raise InputError(f"LoRA needs peft, which cannot be imported ({error}): install attnreg[lora].") from error
        yield peft
