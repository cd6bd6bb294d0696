"""Around the ring: exact attention over sequences that are spread over ranks."""
