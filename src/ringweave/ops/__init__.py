"""Who computes a plan: backends, their dispatch, and the registered operators."""
