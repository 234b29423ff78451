"""A model outside the catalogue, counted on fake tensors."""
