-- What a session has set changes nothing in what the CHECKs and the row triggers decide: who may create operators and functions
-- in some schema, and puts that first in his search_path, would else answer in their place.

-- Called for every row: naming the operators costs nothing, a SET clause would.
create or replace function rota.is_duration(value interval) returns boolean
    language plpgsql immutable strict parallel safe as $$
begin
    return value operator(pg_catalog.>) interval '0'
       and value operator(pg_catalog.<=) interval '366 days'
       and extract(year from value) operator(pg_catalog.=) 0
       and extract(month from value) operator(pg_catalog.=) 0;
end $$;

create or replace function rota.fill_in_job() returns trigger language plpgsql as $$
begin
    if new.queue is null then
        new.queue := coalesce(
            (select handlers.queue from rota.handlers where handlers.handler operator(pg_catalog.=) new.handler), 'default'
        );
    end if;
    new.run_at := coalesce(new.run_at, pg_catalog.now());
    new.scheduled_for := coalesce(new.scheduled_for, new.run_at);
    new.priority := coalesce(new.priority, 5);
    new.payload := coalesce(new.payload, '{}');
    if new.created_by is null then  -- a redriven job brings its own; clients have no privilege on this column
        new.created_by := pg_catalog.current_setting('role', true);
        if new.created_by is null or new.created_by operator(pg_catalog.=) 'none' then
            new.created_by := session_user;
        end if;
    end if;
    return new;
end $$;

alter function rota.fill_in_schedule() set search_path = pg_catalog, pg_temp;
alter function rota.cron_value(integer, text) set search_path = pg_catalog, pg_temp;
alter function rota.is_cron(text) set search_path = pg_catalog, pg_temp;

-- Their patterns hold backslashes, which mean something else where this is off.
alter function rota.is_cron(text) set standard_conforming_strings = on;
alter function rota.rotate_ledger(interval, integer) set standard_conforming_strings = on;
