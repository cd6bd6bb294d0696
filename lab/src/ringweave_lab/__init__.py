"""Tuning, benchmarks, a demonstration, the explorer, a model of many ranks and the GPU campaign of ringweave.

It is a separate distribution, ``ringweave-lab``, which adds its commands to ``ringweave``.
"""

#: The commands that it adds, and their help.
COMMANDS = {
    "bench": (
        "Compare the time and memory of attention with other implementations, checking each result before timing it."
    ),
    "bench page": "Print the goals of stored figures, and write them to a page with charts, a roofline and tables.",
    "bench --gate": (
        "Compare ratios of time with stored ones and with bounds; exit with 1 if one is larger. Five minutes at most."
    ),
    "bench campaign": "Run all measurements of a GPU, each in a separate process with a time limit.",
    "bits": "Check that different ways to compute a row give the same bits on this machine.",
    "demo": "Run ringweave on real text, the source of Python's standard library, and write a report with pictures.",
    "explore": "Compose a pattern on a local page that shows its picture, cost and distribution over ranks.",
    "profile": (
        "Profile forward and backward calls, and print the time of planning, kernels, merging, messages and Python."
    ),
    "simulate": "Model a forward step of attention over a pattern on many GPUs, without running it.",
    "tune": 'Measure the fastest backend and tiles for a call, and store them for backend="auto".',
}
