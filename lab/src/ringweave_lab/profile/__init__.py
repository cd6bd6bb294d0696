"""Profiles of calls."""
