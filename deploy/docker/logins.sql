-- Runs once, when the database is created: a login for the daemons, and one for clients that insert jobs.
-- `rota migrate --roles` accepts these roles and grants their rights later.
create role rota_daemon nologin;
create role rota_client nologin;
create role daemon login password 'daemon' in role rota_daemon;
create role client login password 'client' in role rota_client;
-- For rota_oldest_snapshot_seconds and `rota check`: allows them to see sessions of other logins that hold a snapshot.
grant pg_read_all_stats to daemon;
