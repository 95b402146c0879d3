"""Values and pure functions: no await, no SQL, no clock.

The glossary. docs/concepts.md has the same words:

schedule      a recurring rule: a row of rota.schedules
fire          one due instant of a schedule: a row of rota.fires
job           one unit of work: a row of rota.jobs while it is live, and of the ledger rota.job_runs after it ended
attempt       one execution of a job
claim         a node takes a due job; the claim creates a lease and a fence token
lease         the time limit of a claim, measured on the database's clock
fence token   a number that grows with every claim; every later write must carry the token of its claim
node          one run of a daemon process, with a new UUID at each start
handler       the named function that a job calls
queue         a named group of jobs; every daemon has a fixed number of slots for each queue
slot          a place for one running attempt in a daemon
outcome       what an attempt did: succeeded, failed, timed out, was interrupted, …
settlement    what becomes of the job after an attempt: succeeded, retried, dead, released, cancelled
dead letter   a job that rota will not try again by itself: a row of rota.dead_letters
"""
