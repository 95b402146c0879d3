-- List settings that endanger jobs: of this session, and of other logins that may run a daemon.
--   -> login text?, name text?, value text?
--   login  null for this session
-- Reads the function behind the view pg_settings: any login can lock that view, because PUBLIC may update it.
-- A server started with rota.disposable = on is meant not to be durable, so its durability settings are not listed.
with session_settings as (
    select setting.name, setting.setting as value
    from pg_catalog.pg_show_all_settings() as setting
    where (setting.name, setting.setting) in (
        ('track_counts', 'off'), ('zero_damaged_pages', 'on'), ('ignore_checksum_failure', 'on'),
        ('default_transaction_read_only', 'on')
    )
       or (
           (setting.name, setting.setting) in (('fsync', 'off'), ('full_page_writes', 'off'), ('synchronous_commit', 'off'))
           and current_setting('rota.disposable', true) is distinct from 'on'
       )
       or case
           when setting.name in ('statement_timeout', 'transaction_timeout') then setting.setting::int8 between 1 and 4999
       end
),
login_settings as (
    select
        setting.setrole, split_part(option.text, '=', 1) as name, lower(split_part(option.text, '=', 2)) as value
    from pg_catalog.pg_db_role_setting as setting
    cross join lateral unnest(setting.setconfig) as option (text)
    where setting.setdatabase in (0, (select base.oid from pg_catalog.pg_database as base where base.datname = current_database()))
      and setting.setrole not in (0, session_user::regrole)
      and has_sequence_privilege(setting.setrole, 'rota.fence_tokens', 'UPDATE')
)
select null::text as login, session_settings.name, session_settings.value
from session_settings
union all
select login_settings.setrole::regrole::text, login_settings.name, login_settings.value
from login_settings
where (login_settings.name = 'default_transaction_read_only' and login_settings.value in ('on', 'true', 'yes', '1'))
   or (login_settings.name = 'synchronous_commit' and login_settings.value in ('off', 'false', 'no', '0'))
order by login nulls first, name
