"""Data builds, readers, mixing and streams."""
