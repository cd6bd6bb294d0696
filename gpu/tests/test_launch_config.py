"""Test the launch configurations of the Triton kernels."""

from __future__ import annotations

import pytest

from ringweave_gpu.triton import launch_config as module
from ringweave_gpu.triton.launch_config import Device, LaunchConfig, launch_config_for

HOPPER = Device("hopper", 227 * 1024)
DEVICES = [
    Device("ampere", 99 * 1024), Device("ampere", 163 * 1024), HOPPER, Device("blackwell", 227 * 1024),
    Device("cdna", 64 * 1024),
]  # fmt: skip


@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"{device.generation}-{device.shared}")
def test_configurations_of_the_table_are_valid(kernel: str, device: Device) -> None:
    for dim in (16, 64, 128):
        for itemsize in (2, 4):
            for tile in ((16, 128), (64, 64), (128, 128), (512, 64)):
                blocks = launch_config_for(kernel, dim, dim, itemsize, tile, device)
                sides = (blocks.m, tile[0]), (blocks.n, tile[1])
                assert all(16 <= block <= side and not block & (block - 1) for block, side in sides)
                held, streamed = (blocks.n, blocks.m) if kernel == "backward_kv" else (blocks.m, blocks.n)
                sizes = held, streamed, blocks.stages, dim, dim, itemsize, device
                assert module._shared(kernel, *sizes) <= module._usable(device)
                assert not blocks.described or (itemsize == 2 and device.generation in ("hopper", "blackwell"))


@pytest.mark.parametrize("rule", [*module._RULES, *module._FITTED], ids=lambda rule: rule.why[:60])
def test_every_rule_changes_a_configuration(rule: module.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    def configurations() -> list[LaunchConfig]:
        module.launch_config_for.cache_clear()
        return [
            module.launch_config_for(kernel, dim, dim, 2, tile, device, module.Traits(*traits))
            for kernel in ("forward", "backward_q", "backward_kv")
            for device in DEVICES
            for dim in (64, 128, 256)
            for tile in ((16, 128), (64, 64), (128, 32), (128, 128))
            for traits in ((False, False, False), (False, True, True), (True, False, True), (False, False, True, True))
        ]

    before = configurations()
    for name in ("_RULES", "_FITTED"):
        monkeypatch.setattr(module, name, tuple(each for each in getattr(module, name) if each is not rule))
    assert configurations() != before
    module.launch_config_for.cache_clear()
