"""From what users have, a device mesh or a process group, to a group of ranks and the size of its nodes."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from ...errors import UnsupportedError, message
from ...torch_compat import default_group_was_made, flat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

_WANTED = "a device mesh, a live process group or a Transport"
# whether this process has used a group
_SEEN = threading.Event()
# groups by their ranks, where torch cannot flatten a mesh
_made: dict[tuple[int, ...], ProcessGroup] = {}


def group_of(mesh: DeviceMesh | ProcessGroup | None) -> tuple[ProcessGroup | None, int | None]:
    """Find the group, and ranks per node where the mesh has two dimensions (nodes, ranks of a node).

    Raises:
        UnsupportedError: A mesh of more dimensions, or whose ranks are not in ascending order, or whose groups are
            destroyed; None once the default group is destroyed, which is what ``dist.group.WORLD`` is then.
    """
    if mesh is None and _was_destroyed():
        remedy = "Make the groups again; to compute alone, pass ringweave.parallel.Transport(None)."
        raise UnsupportedError(message("mesh", "None after destroy_process_group()", _WANTED, remedy))
    if mesh is None or not hasattr(mesh, "mesh_dim_names"):
        return mesh, None
    mesh = cast("DeviceMesh", mesh)
    if mesh.ndim != 1:
        ranks = mesh.mesh.flatten()
        if mesh.ndim != 2 or not bool((ranks.diff() > 0).all()):
            got = f"{mesh.ndim} dimensions, ranks {ranks.tolist()}"
            wanted = "one dimension, or two with ranks ascending"
            raise UnsupportedError(message("mesh", got, wanted, "Slice it: mesh['cp'] or mesh['node', 'cp']."))
    try:
        group = mesh.get_group() if mesh.ndim == 1 else _flat_group(mesh)
    except (RuntimeError, KeyError, ValueError) as error:
        got = f"a mesh without a group ({str(error).splitlines()[0][:200]})"
        raise UnsupportedError(message("mesh", got, _WANTED, "Make the mesh again, on all ranks.")) from error
    if mesh.ndim == 1:
        return group, None
    nodes, per_node = mesh.shape
    return group, per_node if nodes > 1 and per_node > 1 else None


def _flat_group(mesh: DeviceMesh) -> ProcessGroup:
    """Give the group of all ranks of a mesh, the same one at each call."""
    import torch.distributed as dist

    one = flat(mesh)
    if one is not None:
        return cast("ProcessGroup", one.get_group())
    ranks = tuple(mesh.mesh.flatten().tolist())
    with suppress(KeyError, ValueError, RuntimeError):  # none yet, or destroyed since
        dist.get_process_group_ranks(_made[ranks])
        return _made[ranks]
    _made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[ranks]


def check_group(group: object) -> None:
    """Raise UnsupportedError unless it is a process group of this process, and not destroyed."""
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        nobody = dist.GroupMember.NON_GROUP_MEMBER
        outside = type(group) is type(nobody) and group == nobody
        got = "a group that this process is no member of" if outside else type(group).__name__
        raise UnsupportedError(message("mesh", got, _WANTED, "Make a context on the members alone."))
    _SEEN.set()
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        # another group of as many ranks may have its store's keys by now
        raise UnsupportedError(
            message("mesh", "a process group that is destroyed", _WANTED, "Make the group again, on all ranks.")
        ) from None


def _was_destroyed() -> bool:
    """Tell whether this process had a default group, and has none now, as far as torch lets it be seen."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or dist.is_initialized():
        return False
    # torch keeps the method when the group is destroyed; it is None where the group was made with a store
    return _SEEN.is_set() or default_group_was_made()
