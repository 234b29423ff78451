"""Our serving engine: continuous batching over a paged cache, on one rank or on the ranks of a layout."""
