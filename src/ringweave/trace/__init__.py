"""Functions of index tensors, and of scores, as graphs of the operations that they compute."""
