"""What runs beside the model in a worker: slots, readout, canvas update, sampler."""
