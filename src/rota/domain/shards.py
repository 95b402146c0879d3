"""Divide the schedules among the nodes. This only saves work: conditional statements keep two nodes from planning the same fire."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.domain.job import NodeId

SHARDS = 256
"""A schedule's shard is schedule_id % 256, a generated column."""

EVERY_SHARD = tuple(range(SHARDS))


@lru_cache(maxsize=8)
def shards_of(node: NodeId, living: frozenset[NodeId]) -> tuple[int, ...]:
    """Return the shards of `node` by rendezvous hashing: when a node ends, only the shards of that node move to others."""
    if node not in living:
        return ()
    others = [other.bytes for other in living if other != node]
    return tuple(
        shard
        for shard in EVERY_SHARD
        if all((_weight(node.bytes, shard), node.bytes) > (_weight(other, shard), other) for other in others)
    )


def _weight(node: bytes, shard: int) -> bytes:
    return blake2b(node, digest_size=8, salt=shard.to_bytes(2, "big")).digest()
