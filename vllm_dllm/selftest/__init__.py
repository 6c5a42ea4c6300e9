"""``vllm-dllm selftest``: does this package compute the right tokens on this very machine?

`machine` says what the machine has, `cases` which ways of serving that gives, and `command` runs
each of them in a process of its own (`child`), on the tiny checkpoints beside this file.
`golden` judges what comes back; `floor` and `bench` time steps; `report` writes the answer down.
"""
