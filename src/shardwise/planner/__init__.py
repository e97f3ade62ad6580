"""From a Job to a Plan."""
