"""What each rank of ``ringweave bench ring`` does; torchrun starts ``python -m ringweave.bench.ranks`` on every one."""
