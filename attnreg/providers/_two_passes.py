"""What providers share that look at each batch before it is trained on."""

from __future__ import annotations

from typing import Literal

from attnreg.provider import MaskProvider


class TwoPasses:
    """Where a provider stands: masks hold for the one forward pass that follows a first pass.

    They hold until the next forward pass begins or the step ends, so gradient checkpointing meets them again in the
    backward pass.

    Example:
        >>> passes = TwoPasses()
        >>> passes.made_first()
        >>> passes.begin_forward()
        >>> passes.masking
        True
        >>> passes.begin_forward()
        >>> passes.masking
        False
    """

    def __init__(self) -> None:
        self._state: Literal["never", "idle", "armed", "masking"] = "never"

    @property
    def masking(self) -> bool:
        """Whether the present forward pass is to be masked."""
        return self._state == "masking"

    def made_first(self) -> None:
        """The first pass is made: the next forward pass is masked."""
        self._state = "armed"

    def begin_forward(self) -> None:
        """A forward pass of the model in training mode begins."""
        if self._state != "never":
            self._state = "masking" if self._state == "armed" else "idle"

    def end(self) -> None:
        """The step is over, or its first pass is forgotten."""
        if self._state != "never":
            self._state = "idle"

    def check(self, provider: MaskProvider) -> None:
        """Called when the provider is asked for a mask.

        Raises:
            RuntimeError: if there has never been a first pass.
        """
        if self._state == "never":
            raise RuntimeError(
                "Expected `provider.attribute(model, batch)` before a training step under "
                f"{type(provider).__name__}, found it was never called: call it, or train with "
                "`attnreg.training.TwoPass` or `attnreg.integrations.ADDropTrainer`, which do."
            )
