"""A model without dropout, a regularizer and a seed, for passes that are repeated."""

import torch
import transformers as hf

import attnreg

IDS = torch.arange(1, 13).view(2, 6)
SEED = 5


def bert(attention="sdpa"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    config = hf.BertConfig(vocab_size=20, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.AutoModelForSequenceClassification.from_config(config, attn_implementation=attention).train()


def composed():
    return attnreg.AttentionDropout(0.3, placement="scores") & attnreg.DropKey(0.2, share_queries=True)
