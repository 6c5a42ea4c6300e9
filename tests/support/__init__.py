"""What tests and benchmarks share: servers, engines, models, references and requests."""
