"""Jobs of test_transport: what every rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringweave.parallel.transport import Transport


def transport(**options: Any) -> Transport:
    return Transport(dist.group.WORLD, **options)


def numbers(source: int, target: int, nbytes: int) -> torch.Tensor:
    """Bytes that say who sent them to whom."""
    return ((torch.arange(nbytes) * 7 + source * 31 + target * 3) % 251).to(torch.uint8)


def part(source: int, target: int) -> int:
    """Bytes from rank to rank: uneven, and none for every third pair."""
    return 0 if (source + 2 * target) % 3 == 0 else 100 * source + 7 * target + 1


def all_to_all(rounds: int) -> dict[str, Any]:
    carrier = transport()
    rank, size = carrier.rank, carrier.size
    carrier.trace = []
    sent_splits = [part(rank, peer) for peer in range(size)]
    splits = [part(peer, rank) for peer in range(size)]
    for _ in range(rounds):
        received = torch.full((sum(splits),), 255, dtype=torch.uint8)
        sent = torch.cat([numbers(rank, peer, count) for peer, count in enumerate(sent_splits)])
        carrier.all_to_all(received, splits, sent, sent_splits, what="tiles").wait()
        for peer, piece in enumerate(received.split(splits)):
            wanted = numbers(peer, rank, splits[peer]) if peer != rank else torch.full_like(piece, 255)
            assert torch.equal(piece, wanted)
    counters = carrier.counters
    carrier.close()
    return {
        "sent": counters.sent, "received": counters.received, "messages": counters.messages,
        "metadata": counters.metadata, "trace": carrier.trace,
    }  # fmt: skip
