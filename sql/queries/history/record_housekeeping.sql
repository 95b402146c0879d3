-- Record which pieces of housekeeping have succeeded or failed, and return those whose last run failed, by whichever daemon.
--   $1 pieces  text[]
--   $2 errors  text[]  null: succeeded
--   -> piece text?, error text?
with recorded as materialized (
    select count(rota.note_housekeeping(each.piece, each.error)) as pieces
    from (
        select given.piece, given.error
        from unnest($1::text[], $2::text[]) as given (piece, error)
        order by given.piece
    ) as each
)
select failed.piece, failed.error
from recorded
cross join (
    select given.piece, given.error
    from unnest($1::text[], $2::text[]) as given (piece, error)
    union all
    select known.piece, known.error
    from rota.housekeeping as known
    where known.piece <> all ($1::text[])
) as failed
where failed.error is not null
