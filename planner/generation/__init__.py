"""Plans for generation: the answer of a search (planner/tasks/generation.py) as a document."""
