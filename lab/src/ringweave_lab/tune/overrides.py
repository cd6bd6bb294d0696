"""Launch kernels with configurations under trial, and record the configurations that they request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ringweave.backends.triton import launch_config
from ringweave.backends.triton.launch_config import LaunchConfig, Request
from ringweave.backends.tuning import KernelKey


@dataclass
class Overrides:
    """Configurations to use, and the requests of kernels so far."""

    configs: Mapping[KernelKey, LaunchConfig]
    requests: list[Request] = field(default_factory=list)

    def __call__(self, request: Request) -> LaunchConfig | None:
        """Record a request, and return its configuration."""
        self.requests.append(request)
        return self.configs.get(request.key)


@contextlib.contextmanager
def overriding(configs: Mapping[KernelKey, LaunchConfig]) -> Iterator[Overrides]:
    """Make kernels in this thread use the given configurations, the table's for other keys, and no stored ones.

    When nested, the inner configurations apply, and requests are recorded for both.
    """
    outer = launch_config.chooser.get()
    given = Overrides(configs, outer.requests) if isinstance(outer, Overrides) else Overrides(configs)
    token = launch_config.chooser.set(given)
    try:
        yield given
    finally:
        launch_config.chooser.reset(token)


def misfit(request: Request, config: LaunchConfig) -> str | None:
    """Return why a configuration does not suit a request; None if it does."""
    key = request.key
    return launch_config.misfit(config, key.kernel, *key.dims, request.itemsize, key.tile, request.device)
