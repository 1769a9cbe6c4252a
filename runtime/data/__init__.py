"""Texts and token shards to documents, documents to batches."""
