"""`rota demo`: start PostgreSQL and three daemons, kill one, pause one past its lease, and show the outcome of every job.

From the bottom up: `app` is the app of the daemons, `fleet` starts and kills them, `records` defines the observations, `observer`
makes them, `screen` prints, `story` plays the acts in order, `checks` verifies the promises, and `main` runs everything.
"""
