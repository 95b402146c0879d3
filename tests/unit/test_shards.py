"""Who looks at which schedules."""

from __future__ import annotations

from uuid import UUID

from rota.domain.job import NodeId
from rota.domain.shards import EVERY_SHARD, shards_of

NODES = frozenset(NodeId(UUID(int=1 << 64 | n)) for n in range(8))


def test_every_shard_has_one_owner() -> None:
    """Nothing goes unserved, and nobody looks twice."""
    owned = [shard for node in NODES for shard in shards_of(node, NODES)]
    assert sorted(owned) == list(EVERY_SHARD)


def test_shards_are_spread() -> None:
    """No node is left with most of the work."""
    assert all(10 <= len(shards_of(node, NODES)) <= 64 for node in NODES)


def test_only_the_shards_of_a_node_that_goes_change_hands() -> None:
    """A deployment of one node must not make all others look at other schedules than before."""
    gone = min(NODES)
    left = NODES - {gone}
    assert all(set(shards_of(node, NODES)) <= set(shards_of(node, left)) for node in left)


def test_a_node_that_is_not_among_the_living_has_none() -> None:
    """Draining, or not seen for too long."""
    assert shards_of(min(NODES), NODES - {min(NODES)}) == ()
