"""FlexAttention for callers of torch, on a processor and with gradients."""
