-- List the objects of the schema, to compare them with those that the migrations make (sql/objects.txt).
--   -> kind text?, name text?, detail text?
--   kind    table (also views and sequences), index, trigger, constraint or function
--   detail  unlogged table, invalid index, hash of a function's source; else empty
-- The partitions of the ledger are left out: they differ each day.
with relations as materialized (
    select relation.oid, relation.relname, relation.relkind, relation.relpersistence
    from pg_catalog.pg_class as relation
    where relation.relnamespace = 'rota'::regnamespace
      and not relation.relispartition
      and not exists (
          select
          from pg_catalog.pg_index as partition_index
          join pg_catalog.pg_class as indexed on indexed.oid = partition_index.indrelid
          where partition_index.indexrelid = relation.oid
            and indexed.relispartition
      )
)
select
    case when relations.relkind in ('i', 'I') then 'index' else 'table' end as kind,
    relations.relname::text as name,
    case
        when relations.relpersistence = 'u' and relations.relkind = 'r' then 'unlogged'
        when not indexes.indisvalid then 'invalid'
        else ''
    end as detail
from relations
left join pg_catalog.pg_index as indexes on indexes.indexrelid = relations.oid
where relations.relkind in ('r', 'p', 'v', 'S', 'i', 'I')
union all
select 'trigger', triggers.tgname || ' on ' || relations.relname, ''
from relations
join pg_catalog.pg_trigger as triggers on triggers.tgrelid = relations.oid and not triggers.tgisinternal
union all
select 'constraint', constraints.conname || ' on ' || relations.relname, ''
from relations
join pg_catalog.pg_constraint as constraints on constraints.conrelid = relations.oid and constraints.contype in ('c', 'f', 'p', 'u')
union all
-- The name must look the same in every session, whose search_path may differ.
select
    'function',
    functions.proname || '(' || coalesce((
        select string_agg(types.typname::text, ', ' order by argument.number)
        from unnest(functions.proargtypes::oid[]) with ordinality as argument (type_id, number)
        join pg_catalog.pg_type as types on types.oid = argument.type_id
    ), '') || ')',
    md5(functions.prosrc)
from pg_catalog.pg_proc as functions
where functions.pronamespace = 'rota'::regnamespace
