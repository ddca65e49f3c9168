"""`[energy]`: what a run says of the electricity that it took."""

from pydantic import Field

from tilewright.core.config.section import Section

MOST_INTENSITY = 3000.0
"""g CO2e per kWh. Power plants that burn the worst lignite are below 1,500."""


class EnergySection(Section):
    """The recipe's `[energy]`: joules from this machine's counters. See `tilewright.energy`."""

    keeps_numbers = ("measure", "idle_seconds", "assume_watts", "intensity", "intensity_source")

    measure: bool = True
    """Read the counters of processors (RAPL) and of the run's GPUs (NVML) during the run, once a second. Where
    there is none, the run says so and gives no number."""
    idle_seconds: float = Field(default=2.0, ge=0, le=600)
    """Where there are counters: how long they are read before the run begins, for the power of the idle machine. 0:
    not at all."""
    assume_watts: float = Field(default=0.0, ge=0, le=1e6)
    """Power of each machine of the run, for an estimate beside what is counted: watts times seconds. 0: nothing is
    estimated."""
    intensity: float = Field(default=0.0, ge=0, le=MOST_INTENSITY)
    """Grams of CO2 equivalent per kWh of the electricity that is used here. 0: no emissions are given."""
    intensity_source: str = ""
    """Where that number is from; it stands beside each figure of emissions."""
