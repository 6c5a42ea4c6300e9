"""The shared parts of families that read the prompt causally and begin a canvas right after it."""
