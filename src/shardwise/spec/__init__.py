"""The nouns: what the user asks for and what was decided. Nothing here imports torch."""
