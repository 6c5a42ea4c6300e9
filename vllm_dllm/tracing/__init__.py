"""Record what happened to a request's canvases, step by step, for trainers and human readers.

worker (`engine.records`)   makes a record of each pass over a canvas, next to the step's logprobs
scheduler (`recorder`)      keeps records until tokens leave, and sends them with those
front end (`trace`)         makes a `Trace` from the records of a request
"""
