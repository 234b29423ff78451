"""A measurement by all ranks at once, within its budget."""
