"""Answers: cached tokens, batches, attention's forms."""
