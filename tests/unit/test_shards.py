"""Distribution of schedule shards over the nodes."""

from __future__ import annotations

from uuid import UUID

from rota.domain.job import NodeId
from rota.domain.shards import EVERY_SHARD, shards_of

NODES = frozenset(NodeId(UUID(int=1 << 64 | n)) for n in range(8))


def test_every_shard_belongs_to_exactly_one_node() -> None:
    owned = [shard for node in NODES for shard in shards_of(node, NODES)]
    assert sorted(owned) == list(EVERY_SHARD)


def test_shards_are_spread_evenly_over_the_nodes() -> None:
    assert all(10 <= len(shards_of(node, NODES)) <= 64 for node in NODES)


def test_only_the_shards_of_a_removed_node_change_their_owner() -> None:
    """Deploying one node must not move the shards of all others."""
    removed_node = min(NODES)
    remaining_nodes = NODES - {removed_node}
    assert all(set(shards_of(node, NODES)) <= set(shards_of(node, remaining_nodes)) for node in remaining_nodes)


def test_a_node_that_is_not_live_owns_no_shard() -> None:
    """It is draining or has sent no heartbeat for too long."""
    assert shards_of(min(NODES), NODES - {min(NODES)}) == ()
