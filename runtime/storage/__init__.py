"""Files that are whole or absent: run directories, checkpoints, metrics."""
