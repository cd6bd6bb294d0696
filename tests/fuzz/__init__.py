"""A differential fuzzer: random calls of the library against a second, independent set of definitions.

``python -m tests.fuzz`` draws calls (:mod:`.calls`) of random patterns (:mod:`.trees`) over random layouts, runs them
(:mod:`.check`), and prints those that fail, as small as Hypothesis makes them (:mod:`.strategies`), as Python to paste.
"""
