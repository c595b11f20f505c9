"""One file per regularizer; ``attnreg/__init__.pyi`` lists them."""
