"""Models of attention on many ranks, for ringweave and other systems."""
