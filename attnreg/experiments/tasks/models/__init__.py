"""Models: pretrained, tiny or with adapters, with their tokenizers and heads."""
