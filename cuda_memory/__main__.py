"""Explain a recording: `python -m cuda_memory FILE.pickle`."""

from cuda_memory.snapshot import snapshot

if __name__ == "__main__":
    snapshot()
