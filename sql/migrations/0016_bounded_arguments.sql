-- Arguments that no column can hold, and keys that no index can hold, are refused by name instead of by PostgreSQL's internals.

-- Each function keeps its definition and gets one check in front: the assignment of an integer to a smallint column fails with
-- "smallint out of range" before any constraint is asked, and the index of rota.fires computes with the instant.
do $do$
declare
    each record;
    definition text;
begin
    for each in
        select * from (values
            ('put_job', 'put_job.priority not between 0 and 9', 'priority must lie between 0 (first) and 9 (last)'),
            ('replace_job', 'replace_job.priority not between 0 and 9', 'priority must lie between 0 (first) and 9 (last)'),
            ('put_schedule', 'put_schedule.priority not between 0 and 9', 'priority must lie between 0 (first) and 9 (last)'),
            ('backfill_schedule',
             'exists (select from unnest(backfill_schedule.instants) as given (instant)'
                 ' where given.instant is null or given.instant < ''1970-01-01 00:00+00'' or given.instant >= ''2200-01-01 00:00+00'')',
             'instants must lie between the years 1970 and 2200')
        ) as given (name, refused, message)
    loop
        definition := pg_get_functiondef(('rota.' || each.name)::regproc);
        execute overlay(
            definition placing
            E'\nbegin\n    if ' || each.refused || E' then\n'
                '        raise exception using errcode = ''check_violation'', message = ' || quote_literal(each.message) || E';\n'
                '    end if;\n'
            from position(E'\nbegin\n' in definition) for length(E'\nbegin\n'));
    end loop;
end $do$;

-- An entry of jobs_unique_key_idx has at most 2704 bytes. A trigger, because stored keys that are longer and compress well must
-- still be claimed, retried and released.
create function rota.refuse_long_key() returns trigger
    language plpgsql as $$
begin
    raise exception using errcode = 'check_violation',
        message = pg_catalog.format('handler and unique_key must have at most 2600 bytes together, not %s',
            pg_catalog.octet_length(new.handler) operator(pg_catalog.+) pg_catalog.octet_length(new.unique_key)),
        hint = 'A digest of a long key, such as encode(sha256(…), ''hex''), is as unique.';
end $$;
create trigger refuse_long_key before insert on rota.jobs for each row
    when (octet_length(new.handler) + octet_length(new.unique_key) > 2600)
    execute function rota.refuse_long_key();
revoke all on function rota.refuse_long_key() from public;
