"""Row statistics, which decoding algorithms read instead of logits: references and kernels."""
