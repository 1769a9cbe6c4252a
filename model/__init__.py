"""What is trained: configurations, the transformer as IR, objective, optimizer, tokenizer."""
