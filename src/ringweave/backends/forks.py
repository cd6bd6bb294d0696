"""Fork safety: before a fork, the forking thread's OpenMP pool is ended, since a child would wait for its threads."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from ..errors import UnsupportedError

_HARD = 2  # omp_pause_hard: ends the pool; the next parallel region creates a new one


class _Pool:
    """The OpenMP pool that torch and the native kernel share.

    A child inherits the forking thread's pool without its threads, and its first parallel region would wait for them
    forever. So the parent ends the pool first, and both processes create a new one when they need it.
    """

    lost = cut_off = False

    def end(self) -> None:
        """End the pool of this thread, in the parent process."""
        try:
            # torch loads its OpenMP library globally, so its symbols are found in the process itself
            self.lost = ctypes.CDLL(None).omp_pause_resource_all(_HARD) != 0
        except AttributeError:  # libgomp before GCC 9
            self.lost = True

    def forked(self) -> None:
        """Record, in the child, that the parent could not end its pool."""
        self.cut_off = self.cut_off or self.lost


_pool = _Pool()
if sys.platform == "linux":
    os.register_at_fork(before=_pool.end, after_in_child=_pool.forked)


def check(device: torch.device) -> None:
    """Raise UnsupportedError if a parallel computation in this process would hang."""
    if _pool.cut_off and device.type == "cpu" and torch.get_num_threads() > 1:
        raise UnsupportedError(
            "process",
            "a fork of a process that could not end its OpenMP threads",
            "a spawned process, or one thread",
            'Use torch.multiprocessing.set_start_method("spawn"), or torch.set_num_threads(1) here.',
        )
