-- Record which housekeeping tasks succeeded or failed. Returns the tasks whose last run failed, on any daemon.
--   $1 pieces  text[]
--   $2 errors  text[]  null: succeeded
--   -> piece text?, error text?
with recorded as materialized (
    select count(rota.note_housekeeping(outcome_row.piece, outcome_row.error)) as pieces
    from (
        select outcome.piece, outcome.error
        from unnest($1::text[], $2::text[]) as outcome (piece, error)
        order by outcome.piece
    ) as outcome_row
)
select failed.piece, failed.error
from recorded
cross join (
    select outcome.piece, outcome.error
    from unnest($1::text[], $2::text[]) as outcome (piece, error)
    union all
    select known.piece, known.error
    from rota.housekeeping as known
    where known.piece <> all ($1::text[])
) as failed
where failed.error is not null
