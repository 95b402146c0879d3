// Graphile Worker. Arguments and output: see common.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(process.cwd() + "/");
const { run, makeWorkerUtils } = require("graphile-worker");
const pg = require("pg");

const [best, jobs, maxSeconds] = [process.argv[2] === "best", +process.argv[3], +process.argv[4]];
const pool = new pg.Pool({ max: 30 });
const utils = await makeWorkerUtils({ pgPool: pool });
await utils.migrate();
for (let stored = 0; stored < jobs; stored += 1000)
  await pool.query(
    "select graphile_worker.add_jobs(array_agg(row('f', '{}'::json, null, null, null, null, null, null)::graphile_worker.job_spec)) " +
      "from generate_series(1, 1000)",
  );
await pool.query("vacuum (analyze)");
const settings = best
  ? { concurrentJobs: 24, localQueue: { size: 500, refetchDelay: { durationMs: 10 } }, completeJobBatchDelay: 0, failJobBatchDelay: 0 }
  : {};
let ended = 0;
const startedAt = performance.now();
const quiet = new (require("graphile-worker").Logger)(() => () => {});
await run({ preset: { worker: { pgPool: pool, ...settings } }, pgPool: pool, logger: quiet, taskList: { f: async () => { ended++; } } });
const left = async () => (await pool.query("select count(*)::int as n from graphile_worker._private_jobs")).rows[0].n;
while (performance.now() - startedAt < maxSeconds * 1000 && (ended < jobs || (await left())))
  await new Promise((resolve) => setTimeout(resolve, 20));
console.log(JSON.stringify({
  version: JSON.parse(readFileSync("node_modules/graphile-worker/package.json")).version,
  settings: best ? "24 jobs, local queue 500, batched completion" : "1 job at once",
  jobs_per_second: ended / ((performance.now() - startedAt) / 1000),
}));
process.exit(0);
