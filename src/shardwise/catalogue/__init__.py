"""Public model shapes, GPUs and machines: data files, a source per figure. No torch."""
