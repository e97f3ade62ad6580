"""Commands, one small file each, and the entry of every rank."""
