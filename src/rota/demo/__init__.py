"""`rota demo`: a PostgreSQL of its own, three daemons, one killed, one stopped past its lease; and what became of every job.

Bottom up: `app` is what its daemons run, `fleet` starts and kills them, `records` is what the witnesses saw, `screen` what is shown
of it, `story` what is done in order, `checks` what was promised, `main` the evening as a whole.
"""
