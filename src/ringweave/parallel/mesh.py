"""From what users have, a device mesh or a process group, to a group of ranks and the size of its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..errors import UnsupportedError, message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh


def group_of(mesh: DeviceMesh | ProcessGroup | None) -> tuple[ProcessGroup | None, int | None]:
    """The group, and ranks per node where the mesh has two dimensions (nodes, ranks of a node).

    Raises:
        UnsupportedError: A mesh of more dimensions, or whose ranks are not in ascending order.
    """
    if mesh is None or not hasattr(mesh, "mesh_dim_names"):
        return mesh, None
    mesh = cast("DeviceMesh", mesh)
    if mesh.ndim == 1:
        return mesh.get_group(), None
    ranks = mesh.mesh.flatten()
    if mesh.ndim != 2 or not bool((ranks.diff() > 0).all()):
        got = f"{mesh.ndim} dimensions, ranks {ranks.tolist()}"
        wanted = "one dimension, or two with ranks ascending"
        raise UnsupportedError(message("mesh", got, wanted, "Slice it: mesh['cp'] or mesh['node', 'cp']."))
    group = mesh._flatten().get_group()
    nodes, per_node = mesh.shape
    return group, per_node if nodes > 1 and per_node > 1 else None
