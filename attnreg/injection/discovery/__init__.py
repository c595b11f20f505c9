"""Find where a model computes attention, by running it once on a tiny input."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from attnreg.errors import NoAttentionError, one_line
from attnreg.injection.discovery.blocks import ModuleCall
from attnreg.injection.discovery.coverage import NOT_CHOSEN, LeftOut, left_out, why_hidden
from attnreg.injection.discovery.example_inputs import example_inputs as make_example_inputs
from attnreg.injection.discovery.finder import AttentionCall, Finder
from attnreg.injection.discovery.sites import ModelSite, sites_of
from attnreg.injection.discovery.snapshot import materialized, unchanged
from attnreg.outputs import own_caches

ONE_AT_A_TIME = threading.Lock()  # a dry run changes global state of torch and restores it

__all__ = ["Discovery", "LeftOut", "ModelSite", "discover"]


@dataclass(frozen=True, eq=False)
class Discovery:
    """The result of a dry run of a model."""

    sites: tuple[ModelSite, ...]  #: the attention that can be masked, in the order in which it runs
    left_out: tuple[LeftOut, ...]  #: other attention, and modules that are named or look like attention
    attentions: tuple[AttentionCall, ...]  #: all computations that looked like attention, in order
    names: Mapping[nn.Module, str]  #: the names of the model's modules
    called: tuple[nn.Module, ...]  #: the modules that ran, in the order of their first calls
    samples: int  #: number of samples of the dry run
    entries: tuple[ModuleCall, ...]  #: the calls of entries of lists, in order
    classifier: ModuleCall | None  #: the call of the linear layer that takes the pooled state, if any

    def left_out_besides(self, chosen: Sequence[ModelSite]) -> tuple[LeftOut, ...]:
        """Return the attention that is left out if only these sites are chosen."""
        rest = [site.info for site in self.sites if site not in chosen]
        return (*self.left_out, *(LeftOut(info.name, info.label, NOT_CHOSEN) for info in rest))


def discover(
    model: nn.Module, example_inputs: Mapping[str, Any] | Sequence[Any] | None = None, *, needs_attention: bool = True
) -> Discovery:
    """Find the attention sites of a model.

    The model runs once on a tiny input, in eval mode, without gradients and hooks, and is left unchanged. A computation
    is attention if it takes the softmax of products of queries and keys (or calls a fused kernel) and multiplies values
    by the resulting weights. It is self-attention if its queries and keys come from the same sequence. A module that
    several layers share (as in ALBERT) has one site per call.

    Raises:
        NoAttentionError: if the model does not run, or no attention is found although the caller ``needs_attention``.
    """
    with ONE_AT_A_TIME, materialized(model):
        finder, classifier = _dry_run(model, example_inputs)
    _refuse_shuffled(finder.attentions)
    left = left_out(finder)
    sites = sites_of(model, finder.names, [attention for attention in finder.attentions if attention.is_attention])
    if not sites and needs_attention:
        seen = "; ".join(map(str, left[:3]))
        raise NoAttentionError(
            f"No attention that can be masked was found in {type(model).__name__}: "
            + (f"{seen}." if seen else why_hidden(model))
        )
    called, entries = tuple(finder.called), tuple(finder.entries)
    return Discovery(sites, left, tuple(finder.attentions), finder.names, called, finder.samples, entries, classifier)


def _refuse_shuffled(attentions: Sequence[AttentionCall]) -> None:
    """Treat queries as reordered in all modules of a class, if a module of this class reorders them."""
    structures = [(attention.structure, type(attention.caller.module)) for attention in attentions]
    classes = {kind for structure, kind in structures if structure and not structure.same_order}
    for attention in attentions:
        if attention.structure is not None and type(attention.caller.module) in classes:
            attention.structure = replace(attention.structure, same_order=False)


def _unshared(tensor: Tensor) -> Tensor:
    """Copy an expanded tensor, so that no two elements share memory; return any other tensor as it is."""
    expanded = tensor.layout == torch.strided and not tensor.is_contiguous() and 0 in tensor.stride()
    return tensor.contiguous() if expanded else tensor


def _dry_run(model: nn.Module, inputs: Mapping[str, Any] | Sequence[Any] | None) -> tuple[Finder, ModuleCall | None]:
    # A head may need more than its backbone, such as an end-of-sentence token or several choices.
    runnables = dict.fromkeys((model, getattr(model, "base_model", model) if inputs is None else model))
    problems: list[Exception] = []
    candidates = ((module, make_example_inputs(module) if inputs is None else [inputs]) for module in runnables)
    for runnable, trial in ((module, trial) for module, trials in candidates for trial in trials):
        named = own_caches(trial if isinstance(trial, Mapping) else dict(enumerate(trial)))
        args, kwargs = ((), named) if isinstance(trial, Mapping) else (tuple(named.values()), {})
        args, kwargs = tree_map_only(Tensor, _unshared, (args, kwargs))
        try:
            with unchanged(model) as tensors:
                finder = Finder(model, tensors, (args, kwargs))
                with finder.watching():
                    output = runnable(*args, **kwargs)
                classifier = finder.classifier(output)
        except NoAttentionError:  # no other inputs would help, and its message says what is wrong
            raise
        except Exception as error:
            problems.append(error)
        else:
            return finder, classifier
    if not problems:
        raise NoAttentionError(
            f"The inputs of {type(model).__name__} are unknown. Pass the arguments of one forward pass with two "
            "samples: `attach(..., example_inputs={...})`."
        )
    raise NoAttentionError(
        f"{type(model).__name__} does not run on example inputs ({type(problems[0]).__name__}: "
        f"{one_line(problems[0])}). Pass inputs that it accepts: `attach(..., example_inputs={{...}})`."
    ) from problems[0]
