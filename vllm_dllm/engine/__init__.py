"""What runs next to the model in a worker: slots, readouts, canvas updates and the sampler."""
