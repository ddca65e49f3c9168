"""Whole runs beside other loops and Trainer."""
