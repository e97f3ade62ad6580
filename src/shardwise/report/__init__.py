"""Plans, unit tables and run folders for people. Nothing here imports torch."""
