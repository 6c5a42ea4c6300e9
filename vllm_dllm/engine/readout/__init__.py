"""Readouts: from the hidden states of canvases to what a decoding algorithm reads.

`contract` has the interface. There is one class for each way to compute it (dense, sharded, tiled,
Triton), and `choice` picks one of them when the engine starts.
"""
