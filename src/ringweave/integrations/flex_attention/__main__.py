"""Run a program with FlexAttention on the CPU: ``python -m ringweave.integrations.flex_attention train.py``."""

from ..launch import launch
from . import install

if __name__ == "__main__":
    launch("ringweave.integrations.flex_attention", install)
