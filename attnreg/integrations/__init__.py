"""Attention regularizers in the Hugging Face Trainer."""

from typing import TYPE_CHECKING

from attnreg._lazy import lazy_names

_NAMES = {
    "ADDropTrainer": "attnreg.integrations.trainer",
    "AttnRegCallback": "attnreg.integrations.callback",
    "Seq2SeqADDropTrainer": "attnreg.integrations.trainer",
}
__all__ = list(_NAMES)
__getattr__, __dir__ = lazy_names(__name__, _NAMES)

if TYPE_CHECKING:
    from attnreg.integrations.callback import AttnRegCallback as AttnRegCallback
    from attnreg.integrations.trainer import ADDropTrainer as ADDropTrainer
    from attnreg.integrations.trainer import Seq2SeqADDropTrainer as Seq2SeqADDropTrainer
