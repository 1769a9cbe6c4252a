"""What a program costs, and what the machine could do at best."""
