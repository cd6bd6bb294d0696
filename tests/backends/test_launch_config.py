"""Test the launch configurations of the Triton kernels: which are valid, which measured ones are used, and results with them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ringweave as rw
from ringweave.backends import tuning, tuning_keys
from ringweave.backends.triton import launch_config as module
from ringweave.backends.triton.launch_config import Device, LaunchConfig, launch_config_for, misfit
from ringweave.call import Call
from ringweave_lab.tune.answers import write_entries

HERE = "a device; versions"
HOPPER = Device("hopper", 227 * 1024, name=HERE)
DEVICES = [
    Device("ampere", 99 * 1024), Device("ampere", 163 * 1024), HOPPER, Device("blackwell", 227 * 1024),
    Device("cdna", 64 * 1024),
]  # fmt: skip
SMALL = LaunchConfig(64, 32, 4, 3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    yield tmp_path
    module._of.cache_clear()


def entry(blocks: object, **changes: object) -> dict[str, object]:
    kind = {
        "kernel": "forward", "where": HERE, "dtype": "bfloat16", "dims": [64, 64], "tile": [128, 128], "masked": True,
    }  # fmt: skip
    fields = dataclasses.asdict(blocks) if isinstance(blocks, LaunchConfig) else blocks
    return kind | {"blocks": fields} | changes


def asked(
    kernel: str = "forward",
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 64,
    masked: bool = True,
    tile: tuple[int, int] = (128, 128),
    device: Device = HOPPER,
) -> LaunchConfig:
    return launch_config_for(kernel, dim, 64, dtype.itemsize, tile, device, (dtype, masked))


USUAL = launch_config_for("forward", 64, 64, 2, (128, 128), HOPPER)


@pytest.mark.parametrize("kernel", ["forward", "backward_q", "backward_kv"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"{device.generation}-{device.shared}")
def test_configurations_of_the_table_are_valid(kernel: str, device: Device) -> None:
    for dim in (16, 64, 128):
        for itemsize in (2, 4):
            for tile in ((16, 128), (64, 64), (128, 128), (512, 64)):
                blocks = launch_config_for(kernel, dim, dim, itemsize, tile, device)
                assert misfit(blocks, kernel, dim, dim, itemsize, tile, device) is None


@pytest.mark.parametrize("rule", [*module._RULES, *module._FITTED], ids=lambda rule: rule.why[:60])
def test_every_rule_changes_a_configuration(rule: module.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    def configurations() -> list[LaunchConfig]:
        module.usual.cache_clear()
        return [
            module.usual(kernel, dim, dim, 2, tile, device, module.Traits(*traits))
            for kernel in ("forward", "backward_q", "backward_kv")
            for device in DEVICES
            for dim in (64, 128, 256)
            for tile in ((16, 128), (128, 32), (128, 128))
            for traits in ((False, False, False), (False, True, True), (True, False, True))
        ]

    before = configurations()
    for name in ("_RULES", "_FITTED"):
        monkeypatch.setattr(module, name, tuple(each for each in getattr(module, name) if each is not rule))
    assert configurations() != before
    module.usual.cache_clear()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"m": 256}, "m is 256, which is not a power of two from 16 to the tile's 128"),
        ({"n": 48}, "n is 48, which is not a power of two"),
        ({"n": 8}, "n is 8, which is not a power of two from 16"),
        ({"warps": 3}, "warps is 3, which is not one of 1, 2, 4, 8, 16"),
        ({"stages": 0}, "stages is 0"),
        ({"resident": -1}, "resident is -1"),
        ({"stages": 7}, r"tiles need \d+ bytes of shared memory, and \d+ of 232448 are available"),
    ],
)
def test_an_invalid_configuration_has_a_reason(changes: dict[str, int], said: str) -> None:
    assert misfit(USUAL, "forward", 64, 64, 2, (128, 128), HOPPER) is None
    found = misfit(dataclasses.replace(USUAL, **changes), "forward", 64, 64, 2, (128, 128), HOPPER)  # type: ignore[arg-type]
    assert found is not None
    with pytest.raises(ValueError, match=said):
        raise ValueError(found)


def test_descriptors_need_the_device() -> None:
    ampere = DEVICES[1]
    described = dataclasses.replace(launch_config_for("forward", 64, 64, 2, (128, 128), ampere), described=True)
    assert misfit(described, "forward", 64, 64, 2, (128, 128), ampere) is not None
    assert misfit(described, "forward", 64, 64, 2, (128, 128), HOPPER) is None


def test_a_measured_configuration_serves_the_same_kernel_and_tiles_only() -> None:
    assert asked() == USUAL
    write_entries([], [entry(SMALL)])
    assert asked() == SMALL
    # the table alone, for offline compilation
    assert launch_config_for("forward", 64, 64, 2, (128, 128), HOPPER) == USUAL
    # 40 channels are padded to 64
    assert asked(dim=40) == SMALL
    for changes in (
        {"kernel": "backward_q"}, {"dtype": torch.float16}, {"dim": 128}, {"masked": False}, {"tile": (64, 128)},
        {"device": dataclasses.replace(HOPPER, name="another")}, {"device": dataclasses.replace(HOPPER, name="")},
    ):  # fmt: skip
        assert asked(**changes) != SMALL  # type: ignore[arg-type]
    write_entries([], [entry(USUAL)])
    assert asked() == USUAL


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (LaunchConfig(256, 32, 4, 3), "m is 256"),
        (LaunchConfig(128, 128, 8, 7), "bytes of shared memory"),
        ({"m": 64, "n": 32}, "their fields are not m, n, warps, stages, resident, described"),
        (dataclasses.asdict(SMALL) | {"cluster": 2}, "their fields are not"),
    ],
)
def test_an_invalid_measured_configuration_is_ignored_with_one_warning(
    blocks: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_entries([], [entry(blocks)])
    with caplog.at_level(logging.WARNING, "ringweave"):
        assert [asked() for _ in range(3)] == [USUAL] * 3
    (line,) = caplog.records
    assert line.message.startswith("measured blocks of forward for tiles of 128 x 128 are ignored: ")
    assert said in line.message


def test_a_call_looks_at_the_file_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entries([], [entry(SMALL)])
    looked = []
    state = tuning._state
    monkeypatch.setattr(tuning, "_state", lambda path: looked.append(path) or state(path))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: 1e9)
    assert [asked() for _ in range(100)] == [SMALL] * 100
    assert len(looked) == 1


def test_what_people_see_of_it() -> None:
    case = Call(1, 2, 2, 256, 256, 64, 64, torch.bfloat16, "cpu")
    assert module.measured(case) == []
    write_entries(
        [], [entry(SMALL, where=tuning_keys.where("cpu")), entry(SMALL, where=tuning_keys.where("cpu"), dims=[128, 64])]
    )
    assert module.measured(case) == [
        "forward on partial tiles of 128 x 128: m 64, n 32, warps 4, stages 3, resident 0, described False"
    ]


def test_explain_names_the_blocks_where_triton_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if rw.backends.triton.installed() is False:
        pytest.skip("triton is not installed")
    write_entries([], [entry(SMALL, where=tuning_keys.where("cpu"), dtype="float16")])
    said = rw.explain(rw.SlidingWindow(9), 256, dtype=torch.float16, backend="triton")
    assert "measured here: forward on partial tiles of 128 x 128: m 64, n 32, warps 4" in said
    assert "measured here" not in rw.explain(rw.SlidingWindow(9), 256, dtype=torch.float16, backend="dense_batched")
