-- Raise the sequence of fence tokens above the database's clock in microseconds, where it lags behind.
-- A sequence can go back at a fail-over, and a token must never be issued twice.
--   -> raised bool?
-- The lock keeps two daemons from setting it one after the other, the second one lower. Claims wait for no lock: without the
-- tenth of a second, those between the look at the sequence and its setting could have tokens that are then issued again.
with locked as materialized (
    select pg_advisory_xact_lock(1919906913, 4)
),
clock as materialized (
    select (extract(epoch from clock_timestamp()) * 1000000)::int8 as micros
    from locked
)
select setval('rota.fence_tokens', clock.micros + 100000) > 0 as raised
from clock
where clock.micros > (select last_value from rota.fence_tokens)
