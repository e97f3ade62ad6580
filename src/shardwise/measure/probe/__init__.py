"""The probe: how fast devices compute, links carry and hosts help, measured with what a training step really calls."""
