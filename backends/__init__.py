"""Backends: what runs the IR. Each knows the IR and nothing of models or the runtime."""
