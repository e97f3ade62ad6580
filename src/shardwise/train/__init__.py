"""The training loop: it knows a Plan, never the planner."""
