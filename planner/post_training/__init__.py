"""Post-training: what each copy of a model costs on pools of every size, and the answer that is written of them."""
