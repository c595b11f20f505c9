"""Tiny models that several tests need, and their inputs."""

import functools

import peft
import torch
import transformers as hf
from torch import nn

from tests.helpers.cases import NO_DROPOUT, SMALL, TEXT, bert_in_float64
from tests.helpers.method_cases import bert

bert_of_three_layers = functools.partial(bert_in_float64, num_hidden_layers=3)
TEXTS = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}


def small():
    config = hf.BertConfig(**{**TEXT, **SMALL, **NO_DROPOUT, "num_hidden_layers": 3})
    return hf.BertModel(config, add_pooling_layer=False).train()


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip():
    """Return a model of texts and images, with the arguments of its methods."""
    text = {**SIZES, "vocab_size": 30, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
    vision = {**SIZES, "image_size": 8, "patch_size": 4}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)).train()
    return model, torch.randint(5, 30, (3, 6)), torch.randn(3, 3, 8, 8)


def encoder(depth=3):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False).train()


def adapted(targets=("query", "value"), model=None, **options):
    """A tiny model whose adapters have learned something."""
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 8, **options}
    model = peft.get_peft_model(model or bert(dropout=0.0), peft.LoraConfig(target_modules=targets, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    return model.double()
