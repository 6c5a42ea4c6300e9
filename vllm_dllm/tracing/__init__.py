"""What happened to a request's canvases, step by step: for trainers, and for people who look at it.

worker (`engine.records`)  a record of each pass over a canvas, beside the step's logprobs
scheduler (`recorder`)          keeps records until tokens leave, and sends them with those
front end (`assembly`)          makes a `trace.Trace` of the records of a request
"""
