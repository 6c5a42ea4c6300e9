"""What decoding algorithms read of rows of logits: references and kernels."""
