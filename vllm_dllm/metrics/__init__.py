"""Prometheus metrics by decoding algorithm, which vLLM's own diffusion metrics do not separate.

scheduler (`families.counting`)     counts the passes and tokens of each step by algorithm
`counts`                            the counters, and how their increments reach the front end
front end (`prometheus`)            adds them to counters next to vLLM's own
"""
