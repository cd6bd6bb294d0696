"""A forked process has torch's pool of threads in name only: what computes on several would wait for them for ever."""

from __future__ import annotations

import os
import sys

import torch

from ..errors import UnsupportedError, message


class _Process:
    """Whether this process has computed on several threads, and whether it was forked from one that had."""

    computed = cut_off = False

    def forked(self) -> None:
        self.cut_off = self.computed


_process = _Process()
if sys.platform == "linux":
    os.register_at_fork(after_in_child=_process.forked)


def check(device: torch.device) -> None:
    """Raise UnsupportedError where a computation would hang."""
    if device.type != "cpu" or torch.get_num_threads() == 1:
        return
    if _process.cut_off:
        raise UnsupportedError(
            message(
                "process",
                "one that was forked after its parent had computed on several threads",
                "one that was spawned, or one thread",
                'Use torch.multiprocessing.set_start_method("spawn"), or torch.set_num_threads(1) here.',
            )
        )
    _process.computed = True
