"""The only package that knows PostgreSQL: files of SQL, typed calls, connections, migrations."""
