"""Joules from this machine's own counters, by what the run did meanwhile; without torch, and without guesses."""
