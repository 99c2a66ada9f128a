"""The PyTorch definition of the transformers, and the readers of their checkpoints."""
