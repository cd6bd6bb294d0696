"""The demonstration on real text, and its report."""

from .demo import DemoResult, run_demo

__all__ = ["DemoResult", "run_demo"]
