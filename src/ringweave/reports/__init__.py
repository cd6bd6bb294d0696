"""What attention with a pattern would compute, as text, numbers and pictures, without running it."""
