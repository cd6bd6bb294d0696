"""Models of many ranks, next to other ways to spread attention."""
