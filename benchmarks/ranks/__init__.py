"""Several processes: exchanges, checkpoints, kills, bytes."""
