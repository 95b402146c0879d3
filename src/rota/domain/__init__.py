"""Values and pure functions: no await, no SQL, no clock.

The words, and what they mean everywhere in rota:

schedule      what recurs
fire          one due instant of a schedule
job           one unit of work: a row of rota.jobs while it lives, then of the ledger rota.job_runs
attempt       one execution of a job
handler       the named thing that a job calls
queue         a named lane with slots of its own in every daemon
node          one incarnation of a daemon process: a fresh uuid at each start
claim         the taking of a due job by a node, under a lease, with a fence token
lease         the claim's term, on the database's clock
fence token   a number that grows with every claim; every later write must show it
outcome       what the attempt did
settlement    what becomes of the job
dead letter   a job that will not be tried again by itself
"""
