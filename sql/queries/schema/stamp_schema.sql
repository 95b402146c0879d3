-- Store the schema's version, and the oldest version of a daemon that may work on it.
--   $1 schema_version     int4
--   $2 oldest_compatible  int4
insert into rota.meta (schema_version, oldest_compatible)
values ($1, $2)
on conflict (only_row) do update
set schema_version = excluded.schema_version,
    oldest_compatible = excluded.oldest_compatible
