"""Markers of the test suite."""


def pytest_configure(config):
    config.addinivalue_line("markers", "oracle: compares with torch, tokenizers or transformers")
    config.addinivalue_line("markers", "shared: needs data that lies beside the repository")
