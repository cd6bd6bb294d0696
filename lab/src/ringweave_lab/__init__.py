"""Benchmarks, a demonstration, the explorer, a model of many ranks and the GPU campaign of ringweave.

It is a separate distribution, ``ringweave-lab``, which adds its commands to ``ringweave``.
"""
