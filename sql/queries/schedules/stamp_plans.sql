-- Record that all next fires were computed by this version of rota and zone data, unless a living daemon has other versions.
--   $1 rota_version  text
--   $2 tzdata        text
--   -> stamped int8?
with stamped as (
    update rota.meta
    set planned_with = format('rota %s, tzdata %s', $1::text, $2::text)
    where not exists (
        select
        from rota.nodes as node
        where node.seen_at > now() - interval '15 seconds'
          and (node.rota_version is distinct from $1 or node.tzdata is distinct from $2)
    )
    returning 1
)
select count(*) as stamped
from stamped
