"""The IR: what a program means. Knows no hardware, no model, no runtime."""
