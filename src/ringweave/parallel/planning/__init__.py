"""Placements, the tiles that each rank needs and receives, and their modelled cost, as arrays without tensors."""
