"""What the checks say of a model type."""

import re
import warnings
from dataclasses import dataclass, field

import torch

import attnreg
from attnreg.injection import CoverageWarning
from attnreg.injection.discovery.coverage import NOT_CHOSEN, OVER_ALL_SCORES
from tests.sweep.afterwards import AFTERWARDS
from tests.sweep.checks import CHECKS, coverage, has_other_ways, kept, run
from tests.sweep.checks import Answer as Provider
from tests.sweep.other_ways import CONVOLVED_KEYS, OTHER_WAYS
from tests.sweep.trace import no_trace

BETWEEN_POSITIONS = ("dropped key", "nothing leaks", "other lengths")


@dataclass
class Verdict:
    """Of one model type.

    Args:
        name: the model type.
        sites: number of attention sites by stack.
        note: what is left out and said, or by which choice of stacks it is covered; or why it is refused.
        wrong: what is wrong, by check.
    """

    name: str
    sites: dict[str, int] = field(default_factory=dict)
    note: str = ""
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def is_refused(self):
        """Whether it cannot be attached to."""
        return not self.sites


def verdict(specimen, *, afterwards=True):
    """Attach to a model type, and run every check, also those of what happens after attaching."""
    torch.manual_seed(0)
    model = specimen.make().train()
    torch.manual_seed(1)
    inputs = specimen.inputs(model)
    options = {"example_inputs": inputs}
    with torch.no_grad():
        model(**inputs)  # what the first pass leaves (caches) is there from now on
    out = Verdict(specimen.name)
    try:
        out.sites, out.note = _attached(model, options)
    except attnreg.injection.NoAttentionError as error:
        out.note = str(error)
        return out
    except attnreg.errors.InputError as error:
        out.note = str(error)
        if "left out" in out.note:
            return out
        options["stacks"] = ["cross"]
        out.sites, out.note = _attached(model, options)
    for name, check in {**CHECKS, **(AFTERWARDS if afterwards else {}), "no trace": no_trace}.items():
        given = {"layers": specimen.layers} if check is coverage else {}
        try:
            check(model, inputs, options, **given)
        except Exception as error:
            said = OVER_ALL_SCORES in out.note
            way = OTHER_WAYS.get(specimen.name)
            known = way is not None and (way == CONVOLVED_KEYS or has_other_ways(model, inputs, options))
            if not (name in BETWEEN_POSITIONS and (said or known)):
                out.wrong[name] = f"{type(error).__name__}: {error}"
    return out


def _attached(model, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CoverageWarning)
        with attnreg.attach(model, Provider(kept), **options) as handle:
            run(model, options["example_inputs"])  # which may be refused
            stacks = [site.stack for site in handle.sites]
            rest = [each for each in handle.left_out if each.is_attention and each.reason != NOT_CHOSEN]
    said = [each for each in caught if each.category is CoverageWarning]
    assert bool(said) == bool(rest), f"{len(rest)} are left out, {len(said)} warnings"
    reasons = sorted({re.sub(r" of \d dimensions", "", f"{each.seen}: {each.reason}") for each in rest})
    return {stack: stacks.count(stack) for stack in sorted(set(stacks))}, "; ".join(reasons)
