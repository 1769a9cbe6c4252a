"""The interpreter behind the backend interface: slow, obvious, and what the others are held to."""
