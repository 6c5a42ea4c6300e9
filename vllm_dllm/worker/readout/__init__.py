"""From the hidden states of canvases to what a decoding algorithm reads.

`contract` has the interface; there is one class for each way (dense, sharded, tiled, Triton), and
`choice` picks one of them when the engine starts.
"""
