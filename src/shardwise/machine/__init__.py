"""What machine this is, and launching ranks on it."""
