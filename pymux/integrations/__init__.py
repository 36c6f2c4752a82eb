"""Thin adapters to frameworks. They use the public API alone."""
