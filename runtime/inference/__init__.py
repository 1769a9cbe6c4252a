"""A trained model in use: prompts, the cache of keys and values, sampling."""
