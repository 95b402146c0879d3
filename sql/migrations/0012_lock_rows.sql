-- Locks that a login without rights can't take, and functions that resolve names in pg_catalog whatever the caller's search_path is.

-- One row per thing that one session does at a time. Only the owner may lock the rows: no role is granted UPDATE here.
create table rota.locks (
    name  text primary key
);
insert into rota.locks (name) values ('fence_tokens'), ('ledger');
comment on table rota.locks is 'Rows that rota''s functions lock, in place of advisory locks, which every login could hold.';

-- Daemons of an older release take the advisory lock (1919906913, 4) here. It is only tried, for a tenth of a second: they hold it
-- for microseconds, and while a stranger holds it, none of them can get as far as setval().
create function rota.raise_fence_tokens() returns boolean
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as $$
declare
    micros bigint;
begin
    for tries in 1..10 loop
        exit when pg_try_advisory_xact_lock(1919906913, 4);
        perform pg_sleep(0.01);
    end loop;
    perform from rota.locks where name = 'fence_tokens' for update;
    micros := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    if micros <= (select last_value from rota.fence_tokens) then
        return false;
    end if;
    -- Claims take no lock. Without the tenth of a second, those between the reading of the sequence and setval() could be given
    -- tokens that are then issued again.
    perform setval('rota.fence_tokens', micros + 100000);
    return true;
end $$;
revoke all on function rota.raise_fence_tokens() from public;
comment on function rota.raise_fence_tokens() is
    'Raise the sequence of fence tokens above the clock in microseconds, where it lags behind: a fail-over can set it back, and a token must never be issued twice.';

do $$
declare
    function regprocedure := 'rota.rotate_ledger(interval, integer)';
    body text := pg_get_functiondef(function);
    row_lock constant text := 'perform from rota.locks as lock where lock.name = ''ledger'' for update skip locked;' || E'\n    if not found then';
begin
    if strpos(body, 'if not pg_try_advisory_xact_lock(1919906913, 2) then') = 0 then
        raise exception 'rota.rotate_ledger() is not the one that this migration knows';
    end if;
    execute replace(body, 'if not pg_try_advisory_xact_lock(1919906913, 2) then', row_lock);

    -- A body that is stored as text is parsed with the search_path of the session that calls it. fill_in_job() and is_duration()
    -- run once for each row, where a SET clause costs too much: they name every operator and function with its schema.
    for function in
        select proc.oid
        from pg_proc as proc
        join pg_language as language on language.oid = proc.prolang
        where proc.pronamespace = 'rota'::regnamespace
          and language.lanname in ('plpgsql', 'sql')
          and proc.prosqlbody is null
          and proc.proname not in ('fill_in_job', 'is_duration')
          and not exists (select from unnest(proc.proconfig) as setting where starts_with(setting, 'search_path='))
    loop
        execute format('alter function %s set search_path = pg_catalog, pg_temp', function);
    end loop;
end $$;

-- DELETE on the view is for the daemons and the owner: with it, a login may lock the tables beneath the view.
comment on view rota.schedules is
    'What recurs. INSERT and UPDATE as you like, and remove with rota.remove_schedule(): daemons notice at once. NULL means the default. state: ok, invalid, '
    'paused, overdue (an instant has come, and for 30 s nobody has decided about it) or ended.';
