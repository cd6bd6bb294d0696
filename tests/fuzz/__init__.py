"""A differential fuzzer: random calls of the library against a second, independent set of definitions.

``python -m tests.fuzz`` draws calls (:mod:`.calls`) of random patterns (:mod:`.trees`) over random layouts, runs them
(:mod:`.check`), shrinks those that fail and prints them as Python to paste (:mod:`.shrink`).
"""
