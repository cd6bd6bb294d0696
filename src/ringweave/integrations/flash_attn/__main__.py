"""Run a program with flash-attn's functions: ``python -m ringweave.integrations.flash_attn train.py``."""

from ..launch import launch
from . import install

if __name__ == "__main__":
    launch("ringweave.integrations.flash_attn", install)
