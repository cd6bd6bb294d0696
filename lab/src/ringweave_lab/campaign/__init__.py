"""Measurements of a GPU in a limited time, each in a separate process."""
