"""The steps of a rank in a call: agree with the other ranks, send and receive, compute, merge."""
