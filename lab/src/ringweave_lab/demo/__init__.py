"""The demonstration on real text, and its report."""
