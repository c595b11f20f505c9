"""UniDrop: dropout of attention weights, blocks and tokens."""

from __future__ import annotations

from attnreg.arguments import probability
from attnreg.regularizer.base import Container
from attnreg.regularizer.containers import OnLayers
from attnreg.regularizers.attention_dropout import AttentionDropout
from attnreg.regularizers.hidden_dropout import HiddenDropout
from attnreg.regularizers.layerdrop import LayerDrop
from attnreg.regularizers.token_dropout import TokenDropout


class UniDrop(Container):
    r"""Drop attention weights, whole blocks and tokens together.

    .. math:: \text{UniDrop} = \underbrace{\text{AttentionDropout}}_{\text{feature}} \;\&\;
        \underbrace{\text{LayerDrop}}_{\text{structure}} \;\&\; \underbrace{\text{TokenDropout}}_{\text{data}}

    Of the paper's four feature dropouts, it does the first, on attention weights (FD-1), and, if ``output`` is above 0,
    the last, on the output of the last block of each stack (FD-4). FD-2 (activations) and FD-3 (query, key and value)
    act inside modules, where attnreg cannot reach: use the model's own dropout there. Tokens are masked, not deleted;
    see :class:`TokenDropout`.

    Args:
        attention: probability p of dropping an attention weight; kept weights are divided by 1 - p.
        block: probability of skipping a block.
        token: probability of dropping a token, in a sequence that is not kept whole.
        keep_whole: probability of keeping all tokens of a sequence.
        output: probability of dropping a value at the output of the last block; kept values are divided by 1 - p.

    Reference:
        UniDrop (NAACL 2021, arXiv 2104.04946), Section 2.

    Example:
        >>> UniDrop(attention=0.2).together.providers[0]
        AttentionDropout(p=0.2, placement='weights', rescale=True)
    """

    def __init__(
        self,
        attention: float = 0.1,
        block: float = 0.1,
        token: float = 0.1,
        keep_whole: float = 0.5,
        output: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = probability("attention", attention)
        self.block = probability("block", block)
        self.token = probability("token", token)
        self.keep_whole = probability("keep_whole", keep_whole)
        self.together = AttentionDropout(attention) & LayerDrop(block) & TokenDropout(token, keep_whole)
        self.output = probability("output", output)
        if output:
            self.together = self.together & OnLayers(HiddenDropout(output), [-1])
