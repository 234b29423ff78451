"""What a run trains on: text and token files, and which rank sees which samples when."""
