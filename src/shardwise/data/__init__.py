"""From a file of rows to the micro-batches of one rank."""
