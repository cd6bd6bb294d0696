"""Integrations with other libraries; each imports its library, so import it only where you use it."""
