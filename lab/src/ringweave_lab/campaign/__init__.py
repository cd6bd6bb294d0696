"""Everything that can be measured on a GPU in a limited time, each part in a process of its own."""
