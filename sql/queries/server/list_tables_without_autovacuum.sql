-- List rota's tables, partitions included, for which autovacuum is turned off.
--   -> name text?
select relation.oid::regclass::text as name
from pg_catalog.pg_class as relation
cross join lateral pg_options_to_table(relation.reloptions) as option
where relation.relnamespace = to_regnamespace('rota')
  and relation.relkind = 'r'
  and option.option_name = 'autovacuum_enabled'
  and not option.option_value::bool
order by name
