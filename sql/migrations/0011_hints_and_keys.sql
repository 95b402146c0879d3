-- A notification is a hint: that none can be sent keeps no job from being inserted, settled or cancelled. And a bound for what lies in one index.

-- One session that listens, on whatever channel of whatever database, and leaves a transaction open keeps the server's one queue of
-- notifications from being emptied. Once it is full, every transaction that would notify fails at its end; and it stays so until
-- somebody asks how full it is, which is what moves its beginning on.
-- For PREPARE TRANSACTION, which refuses whoever has notified, there is the setting.
create function rota.tell(channel text, message text) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if current_setting('rota.notify', true) is distinct from 'off' and pg_notification_queue_usage() < 0.9 then
        perform pg_notify(channel, message);
    end if;
end $$;
revoke all on function rota.tell(text, text) from public;
comment on function rota.tell is
    'NOTIFY where that can be done. `set local rota.notify = off` is for transactions that are to be prepared: polling finds what they bring.';

-- Whoever may insert a dead letter need not be able to call it.
alter function rota.tell_of_dead_letter() security definer set search_path = pg_catalog, pg_temp;

-- Nothing else of these changes, so their text is taken as it stands.
do $$
declare
    teller regprocedure;
begin
    for teller in
        select unnest(array[
            'rota.wake_dispatchers()', 'rota.wake_schedulers()', 'rota.tell_of_dead_letter()',
            'rota.cancel(bigint, boolean, text)', 'rota.cancel_many(text, text, timestamptz, integer, text)',
            'rota.resume_queue(text, text)', 'rota.resume_handler(text, text)']::regprocedure[])
    loop
        execute replace(pg_get_functiondef(teller), 'perform pg_notify(', 'perform rota.tell(');
    end loop;
end $$;

-- Within its bounds an index would still refuse a key of many-byte characters beside a long handler, in words that nobody can read.
-- Only what has never been claimed is judged: what went into the index by its compression must not be stopped on its way.
alter table rota.jobs add constraint "handler and unique_key must have at most 2680 bytes together"
    check (fence_token is not null or octet_length(handler) + octet_length(unique_key) <= 2680) not valid;

-- It writes days as text and reads them again: not every style that a session may have set takes both.
alter function rota.rotate_ledger(interval, integer) set datestyle = 'ISO, YMD';
