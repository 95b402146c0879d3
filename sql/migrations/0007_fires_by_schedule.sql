-- What became of one schedule's instants, and how many schedules are in which state, without a walk over all; and which of the fires
-- that wait replace a job.

-- An index by schedule_id would have each fire of a spike touch a page of its own. By day first, the fires of a spike lie together,
-- and a schedule's history costs one probe for each day that fires are kept. One number made of the UTC day and the schedule_id (of
-- its lowest 40 bits: whoever reads compares the schedule_id, too), because two columns would be a way to look up one fire: a plan
-- made while the table is empty likes it as much as the primary key, and later walks all of it.
create index list_fires_idx on rota.fires (
    ((((scheduled_for at time zone 'UTC')::date - date '1970-01-01')::int8 << 40) | (schedule_id & 1099511627775))
);

-- With misfire all and overlap replace, what is caught up waits in turn: of the fires that wait, not each replaces the live job.
alter table rota.fires add column replaces boolean;
comment on column rota.fires.replaces is 'True: it asked the live job to cancel, and waits for its end.';

-- Counting schedules by state looks at those that are not in order; of the others it needs the number alone.
create index count_stopped_schedules_idx on rota.schedule_clocks (schedule_id) where next_fire_at is null;
create index count_paused_schedules_idx on rota.schedule_definitions (schedule_id) where paused;
create index sample_watched_schedules_idx on rota.schedule_definitions (schedule_id) where expect_success_within is not null;
