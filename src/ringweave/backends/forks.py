"""Forked processes: before a fork, the forking thread's OpenMP pool ends, since a child would wait for its threads."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

from ..errors import UnsupportedError, message

_HARD = 2  # omp_pause_hard: the pool ends, and the next parallel region makes another


class _Pool:
    """The pool that torch and the native kernel share, whoever started it.

    A child inherits the forking thread's pool without its threads, and its first parallel region waits for them
    for ever. So the parent gives the pool up first; both processes make another one when they need it.
    """

    lost = cut_off = False

    def end(self) -> None:
        """End the pool of this thread, in the process that forks."""
        try:
            # torch loads its OpenMP for the whole process
            self.lost = ctypes.CDLL(None).omp_pause_resource_all(_HARD) != 0
        except AttributeError:  # libgomp before GCC 9
            self.lost = True

    def forked(self) -> None:
        """Note, in the child, that the parent could not end its pool."""
        self.cut_off = self.cut_off or self.lost


_pool = _Pool()
if sys.platform == "linux":
    os.register_at_fork(before=_pool.end, after_in_child=_pool.forked)


def check(device: torch.device) -> None:
    """Raise UnsupportedError where a computation would hang."""
    if _pool.cut_off and device.type == "cpu" and torch.get_num_threads() > 1:
        raise UnsupportedError(
            message(
                "process",
                "one that was forked from a process that could not end its OpenMP threads",
                "one that was spawned, or one thread",
                'Use torch.multiprocessing.set_start_method("spawn"), or torch.set_num_threads(1) here.',
            )
        )
