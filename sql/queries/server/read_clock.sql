-- Return the database's clock, which decides when jobs are due and leases end.
--   -> now timestamptz?
select clock_timestamp() as now
