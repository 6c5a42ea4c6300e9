"""What families share whose canvases begin right after the prompt, which is read causally."""
