"""What a rank does in a call: agree with the others, send and receive, compute, merge."""
