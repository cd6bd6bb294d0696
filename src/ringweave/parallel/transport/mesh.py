"""The process group of a device mesh or group that a user passes, and the size of its nodes."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from ...errors import UnsupportedError, first_line
from ...torch_compat import default_group_was_made, flat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

_WANTED = "a device mesh, a live process group or a Transport"
# set once this process has used a group
_SEEN = threading.Event()
# groups by their ranks, for versions of torch that cannot flatten a mesh
_made: dict[tuple[int, ...], ProcessGroup] = {}


def group_of(mesh: DeviceMesh | ProcessGroup | None) -> tuple[ProcessGroup | None, int | None]:
    """Return the group, and the number of ranks per node if the mesh has two dimensions (nodes, ranks of a node).

    Raises:
        UnsupportedError: The mesh has more dimensions, its ranks are not ascending, or its groups are destroyed. Also
            raised for None after the default group is destroyed, since ``dist.group.WORLD`` is None then.
    """
    if mesh is None and _was_destroyed():
        remedy = "Create the groups again; to compute on one rank, pass ringweave.parallel.Transport(None)."
        raise UnsupportedError("mesh", "None after destroy_process_group()", _WANTED, remedy)
    if mesh is None or not hasattr(mesh, "mesh_dim_names"):
        return mesh, None
    mesh = cast("DeviceMesh", mesh)
    if mesh.ndim != 1:
        ranks = mesh.mesh.flatten()
        if mesh.ndim != 2 or not bool((ranks.diff() > 0).all()):
            got = f"{mesh.ndim} dimensions, ranks {ranks.tolist()}"
            wanted = "one dimension, or two with ranks ascending"
            raise UnsupportedError("mesh", got, wanted, "Slice it: mesh['cp'] or mesh['node', 'cp'].")
    try:
        group = mesh.get_group() if mesh.ndim == 1 else _flat_group(mesh)
    except (RuntimeError, KeyError, ValueError) as error:
        got = f"a mesh without a group ({first_line(error)})"
        raise UnsupportedError("mesh", got, _WANTED, "Create the mesh again on all ranks.") from error
    if mesh.ndim == 1:
        return group, None
    nodes, per_node = mesh.shape
    return group, per_node if nodes > 1 and per_node > 1 else None


def _flat_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of all ranks of a mesh, the same group at each call."""
    one = flat(mesh)
    if one is not None:
        return cast("ProcessGroup", one.get_group())
    ranks = tuple(mesh.mesh.flatten().tolist())
    with suppress(KeyError, ValueError, RuntimeError):  # not created yet, or destroyed since
        dist.get_process_group_ranks(_made[ranks])
        return _made[ranks]
    _made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[ranks]


def check_group(group: object) -> None:
    """Raise UnsupportedError unless ``group`` is a live process group that contains this process."""
    if not isinstance(group, dist.ProcessGroup):
        nobody = dist.GroupMember.NON_GROUP_MEMBER
        outside = type(group) is type(nobody) and group == nobody
        got = "a group that this process is no member of" if outside else type(group).__name__
        raise UnsupportedError("mesh", got, _WANTED, "Create the context only on the group's members.")
    _SEEN.set()
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        # its store's keys may already belong to a new group of the same size, so do not use it any further
        raise UnsupportedError(
            "mesh", "a process group that is destroyed", _WANTED, "Create the group again on all ranks."
        ) from None


def _was_destroyed() -> bool:
    """Return whether this process had a default group that is destroyed now, if torch's state shows it."""
    if not dist.is_available() or dist.is_initialized():
        return False
    # torch keeps the init method after the group is destroyed; it is None for a group created with a store, so _SEEN
    # covers that case
    return _SEEN.is_set() or default_group_was_made()
