"""Models of others: Hugging Face folders in and out, GGUF out."""
