"""Use attention regularizers in the Hugging Face Trainer."""

from attnreg._lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__, __file__, deprecated=["ADDropTrainer", "Seq2SeqADDropTrainer", "RDropTrainer"]
)
