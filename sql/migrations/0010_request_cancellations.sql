-- Request the cancellation of several running jobs, without waiting for a client's open transaction that has requested the same.
-- Such requests are left out. The next call tries them again. Returns the number of new requests.
create function rota.request_cancellations(job_ids bigint[], reason text) returns bigint
    language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '10ms' as $$
declare
    max_locked constant integer := 20;
    locked_count integer := 0;
    requested bigint := 0;
    one_job_id bigint;
begin
    begin
        insert into rota.cancel_requests (job_id, requested_by, reason)
        select job_id, rota.caller(), request_cancellations.reason
        from unnest(job_ids) as job (job_id)
        order by job_id
        on conflict do nothing;
        get diagnostics requested = row_count;
    exception when lock_not_available then
        -- In random order, so that each request is tried in one of the next calls.
        for one_job_id in select job_id from unnest(job_ids) as job (job_id) order by random() loop
            begin
                insert into rota.cancel_requests (job_id, requested_by, reason)
                values (one_job_id, rota.caller(), request_cancellations.reason)
                on conflict do nothing;
                requested := requested + found::int;
            exception when lock_not_available then
                locked_count := locked_count + 1;
                exit when locked_count = max_locked;
            end;
        end loop;
    end;
    if requested > 0 then
        perform rota.tell('rota_cancel', '');
    end if;
    return requested;
end $$;

revoke all on function rota.request_cancellations(bigint[], text) from public;
