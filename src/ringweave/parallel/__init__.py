"""Context parallelism: one sequence around a ring of ranks, exact, moving only the keys that the pattern needs."""
