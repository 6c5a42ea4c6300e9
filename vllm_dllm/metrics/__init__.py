"""What vLLM's Prometheus metrics of diffusion do not tell apart: the decoding algorithms.

scheduler (`families.counting`)     counts the passes and tokens of each step by algorithm
`counts`                            the counters, and how their increments reach the front end
front end (`prometheus`)            adds them to counters beside vLLM's own
"""
