"""Bytes between ranks, with deadlines and failures that reach every rank; only this calls torch.distributed."""
