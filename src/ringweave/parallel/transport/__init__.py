"""Messages between ranks, with deadlines and failures that reach every rank; the only user of torch.distributed."""
