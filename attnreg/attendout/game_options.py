"""Which options of AttendOut's game fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from attnreg.arguments import not_negative, one_of, probability_below_one, true_or_false
from attnreg.attendout.reinforce import Baseline
from attnreg.attendout.rewards import RewardPer
from attnreg.errors import InputError
from attnreg.regularizer.abilities import that_look_at_batches
from attnreg.regularizer.base import Compose, Regularizer

CreditName = Literal["reinforce", "gradient"]
_USUAL = {
    "reward_per": "round",
    "reward_baseline": "moving",
    "antithetic": False,
    "credit": "reinforce",
    "price": 0.03,
    "averaging": 0.98,
}


def check_options(generator: Regularizer | None, options: Mapping[str, Any]) -> None:
    """Check the options that say how the Generator learns.

    Args:
        generator: the provider that masks the Attacker, or ``None``.
        options: ``reward_per``, ``reward_baseline``, ``antithetic``, ``credit``, ``price``, ``averaging`` and
            ``reward_batches``.

    Raises:
        InputError: if one of them is unknown, or would be without effect.
    """
    one_of("reward_per", options["reward_per"], get_args(RewardPer))
    one_of("reward_baseline", options["reward_baseline"], get_args(Baseline))
    one_of("credit", options["credit"], get_args(CreditName))
    true_or_false("antithetic", options["antithetic"])
    not_negative("price", options["price"])
    probability_below_one("averaging", options["averaging"])
    given = [name for name, usual in _USUAL.items() if options[name] != usual]
    if generator is None and given:
        raise InputError(f"`{given[0]}` has no effect without a Generator: leave it out.")
    by_gradient = options["credit"] == "gradient"
    idle = {"reward_per", "reward_baseline", "antithetic"} if by_gradient else {"price", "averaging"}
    if ignored := [name for name in given if name in idle]:
        raise InputError(f"`{ignored[0]}` has no effect with credit {options['credit']!r}: leave it out.")
    if by_gradient and options["reward_batches"] is None:
        raise InputError("Expected `reward_batches` with credit 'gradient', got None.")
    if by_gradient and generator is not None and (others := that_look_at_batches(generator)):
        raise InputError(
            f"{type(others[0]).__name__} cannot be used with credit 'gradient', which makes passes of its own."
        )
    if options["antithetic"] and isinstance(generator, Compose):
        raise InputError("Expected the Generator alone with `antithetic`, got a composition.")


def generator_in(provider: Regularizer) -> Any:
    """Return the Generator: the provider itself, or the one in a composition ``a & b``.

    Raises:
        InputError: if there is not exactly one, or another provider decides when it acts.
    """
    parts = list(provider.providers) if isinstance(provider, Compose) else [provider]
    found = [part for part in parts if hasattr(part, "sample")]
    if len(found) != 1:
        raise InputError(
            f"Expected one Generator, such as a GNetProvider, alone or in a composition `a & b`, got {len(found)} in "
            f"{type(provider).__name__}."
        )
    return found[0]
