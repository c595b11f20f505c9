"""Models: pretrained, tiny or with adapters, each with its tokenizer and the head of its task."""
