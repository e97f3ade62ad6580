"""What a Plan means in figures, before anything runs."""
