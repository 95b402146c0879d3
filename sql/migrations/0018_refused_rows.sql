-- The rows with which the database refuses an operation of a daemon, so that commands can name them: only its log did.
alter table rota.nodes add column refused jsonb;
comment on column rota.nodes.refused is
    'Rows with which the database refused an operation of this daemon within a minute: an array of objects, at most 20.';
