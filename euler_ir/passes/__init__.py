"""Passes: one a module, each Function -> Function; `pipeline` says in which order and why."""
