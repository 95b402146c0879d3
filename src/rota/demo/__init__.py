"""`rota demo`: start a PostgreSQL and three daemons, kill one, pause one past its lease, and show what became of every job.

From the bottom up: `app` is the app of the daemons, `fleet` starts and kills them, `records` holds the observations, `screen`
prints, `story` plays the acts in order, `checks` verifies the promises, and `main` runs all of it.
"""
