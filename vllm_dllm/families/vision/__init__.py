"""What models that read pictures share, and the masked models among them."""
