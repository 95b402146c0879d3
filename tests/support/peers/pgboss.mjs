// pg-boss. Arguments and output: see common.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(process.cwd() + "/");
const module = require("pg-boss");
const PgBoss = module.PgBoss ?? module;
const pg = require("pg");

const [best, jobs, maxSeconds] = [process.argv[2] === "best", +process.argv[3], +process.argv[4]];
const { PGHOST: host, PGPORT: port, PGUSER: user, PGDATABASE: database } = process.env;
const boss = new PgBoss({ host, port: +port, user, database, max: 20 });
await boss.start();
await boss.createQueue("f");
for (let stored = 0; stored < jobs; stored += 1000) {
  const batch = Array.from({ length: 1000 }, () => ({ name: "f", data: {} }));
  await (boss.insert.length > 1 ? boss.insert("f", batch) : boss.insert(batch));
}
const pool = new pg.Pool();
await pool.query("vacuum (analyze)");
let ended = 0;
const startedAt = performance.now();
for (let worker = 0; worker < (best ? 4 : 1); worker++)
  await boss.work("f", best ? { batchSize: 500, pollingIntervalSeconds: 0.5 } : {}, async (batch) => { ended += batch.length; });
const left = async () => (await pool.query("select count(*)::int as n from pgboss.job where name = 'f' and state < 'completed'")).rows[0].n;
while (performance.now() - startedAt < maxSeconds * 1000 && (ended < jobs || (await left())))
  await new Promise((resolve) => setTimeout(resolve, 20));
console.log(JSON.stringify({
  version: JSON.parse(readFileSync("node_modules/pg-boss/package.json")).version,
  settings: best ? "4 workers, batchSize 500, polled each 0.5 s" : "1 worker, batchSize 1, polled each 2 s",
  jobs_per_second: ended / ((performance.now() - startedAt) / 1000),
}));
process.exit(0);
