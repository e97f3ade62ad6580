"""After the last step: exports, and the check of them in a fresh process."""
