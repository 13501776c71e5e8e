"""From arguments to a plan: checks, statistics needed, sizes, memory, and the planner."""
