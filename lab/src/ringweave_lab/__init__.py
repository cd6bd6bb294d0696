"""The laboratory of ringweave: benchmarks, the demonstration, the explorer, models of many ranks, the GPU campaign.

It is a separate distribution, ``ringweave-lab``, which adds its commands to ``ringweave``.
"""
