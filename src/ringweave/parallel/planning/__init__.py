"""What each rank holds, needs and receives, and what that costs: arrays of tiles and tokens, without tensors."""
