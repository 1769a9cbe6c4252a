"""A trained model measured: scores of given text, and lm-evaluation-harness."""
