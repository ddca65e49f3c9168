"""How far measured seconds are from planned ones. Apart from `pace`, as reports judge by it without torch."""

OFF = 1.5
"""Measured over planned seconds, or planned over measured, from which on a plan was wrong."""


def off_plan(planned_s: float, measured_s: float) -> float:
    """The factor by which a step is longer or shorter than planned.

    Example:
        >>> off_plan(6.5, 13.0), off_plan(6.0, 1.5)
        (2.0, 4.0)
    """
    return max(measured_s / planned_s, planned_s / measured_s)
