-- Record a migration as applied, in the transaction that applied it.
--   $1 version   int4
--   $2 name      text
--   $3 checksum  text   sha256 of the file, in hex
insert into rota.migrations (version, name, checksum)
values ($1, $2, $3)
