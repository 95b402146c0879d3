-- Delete the starts that no longer count for their limit, and the holds that have ended.
--   $1 keep   interval  keep starts that much longer than the limit's interval
--   $2 limit  int8      most rows of one key
--   -> pruned int8?
-- index: limit_starts_pkey (0012)
with recursive started as (
    (select start.key from rota.limit_starts as start order by start.key limit 1)
    union all
    select (
        select start.key from rota.limit_starts as start where start.key > started.key order by start.key limit 1
    )
    from started
    where started.key is not null
),
expired as materialized (
    select start.row_id
    from started
    left join lateral rota.limit_of(started.key) as limits on true
    cross join lateral (
        select start.ctid as row_id, start.started_at
        from rota.limit_starts as start
        where start.key = started.key
        order by start.number
        limit $2
    ) as start
    where start.started_at < now() - coalesce(limits.per, interval '0') - $1::interval
),
deleted as (
    delete from rota.limit_starts where ctid = any (array(select expired.row_id from expired)) returning 1
),
deleted_holds as (
    delete from rota.limit_holds where held_until < now() - $1::interval returning 1
)
select (select count(*) from deleted) + (select count(*) from deleted_holds) as pruned
