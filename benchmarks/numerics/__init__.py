"""Formats and operations: losses, errors, seconds."""
