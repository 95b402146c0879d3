-- Read the only clock that decides.
--   -> now timestamptz?
select clock_timestamp() as now
