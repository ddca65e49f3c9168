"""Stages: idle time, parity, memory."""
