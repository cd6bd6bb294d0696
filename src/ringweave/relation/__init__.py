"""Relations: the zones of patterns, and the one evaluator of them."""
