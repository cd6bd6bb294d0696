"""Test the NCCL link over a simulated NCCL: the work that it starts, and how its waits end. Other tests cover Gloo."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringweave.errors import UnsupportedError, first_line, in_a_line
from ringweave.parallel.transport.links import LinkError, NcclLink, Tagged


class Work:
    """Work that completes after a number of polls."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.waited = False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True


class Group:
    """Record the calls that an NCCL process group would receive."""

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.calls: list[Any] = []
        self.seconds = options._timeout.total_seconds()

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Work:
        self.calls.append("end")
        return Work(3)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("send", peer, tensors[0].numel()))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        if peer == 13:
            raise RuntimeError("NCCL error: unhandled\nframe #0")
        self.calls.append(("recv", peer, tensors[0].numel()))

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> NcclLink:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    return NcclLink(None, 0, 4, 30.0)  # type: ignore[arg-type]


def test_messages_start_together(link: NcclLink) -> None:
    sends, receives = [Tagged(1, torch.zeros(5), 9), Tagged(2, torch.zeros(6), 9)], [Tagged(3, torch.zeros(7), 9)]
    ((peer, work),) = link.post(sends, receives)
    assert link._group.calls == ["start", ("recv", 3, 7), ("send", 1, 5), ("send", 2, 6), "end"]
    link.wait(peer, work, 5.0, lambda: False)
    assert work.waited
    # NCCL's watchdog ends the process, so it must not time out first
    assert link._group.seconds > 300
    assert link.post([], []) == []


def test_a_torch_without_calls_to_start_messages_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        __slots__ = ()  # like a C class, it accepts no other attribute

    class Other:
        def __init__(self, *_: object) -> None:
            self.made = True

    Other.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Other, raising=False)
    with pytest.raises(UnsupportedError, match="NCCL's messages together"):
        NcclLink(None, 0, 4, 30.0)  # type: ignore[arg-type]


def test_a_wait_ends_at_its_deadline(link: NcclLink) -> None:
    start = time.monotonic()
    with pytest.raises(LinkError) as caught:
        link.wait(2, Work(10**9), 0.1, lambda: False)
    assert caught.value.peer == 2
    assert caught.value.timeout
    assert time.monotonic() - start >= 0.1


def test_a_wait_ends_when_the_link_is_cut(link: NcclLink) -> None:
    with pytest.raises(LinkError, match="cut") as caught:
        link.wait(2, Work(10**9), 60.0, lambda: True)
    assert not caught.value.timeout
    link.cut()
    assert link._group.calls == ["abort"]


def test_an_error_of_nccl_is_told_in_one_line(link: NcclLink) -> None:
    with pytest.raises(LinkError) as caught:
        link.post([], [Tagged(13, torch.zeros(1), 0)])
    assert caught.value.cause == "NCCL error: unhandled"


def test_an_error_of_gloo_becomes_a_line_of_ascii() -> None:
    """The text of another library's error is cut to its first line, without symbols and the file name in front."""
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:547] ⚠️ Connection closed by peer 🔥\nframe #0: 0x0")
    assert first_line(error) == "Connection closed by peer"
    assert in_a_line(error) == "RuntimeError: Connection closed by peer"
    assert first_line(RuntimeError()) == ""
