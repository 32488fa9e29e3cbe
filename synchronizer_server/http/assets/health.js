// What everybody wants to know first: a row of signs below the title.

import { byId, fill, make, setText, setTone } from "./dom.js";
import { count } from "./words.js";

// While the run goes on somebody must be there to be merged.
export const isUnderWay = (status) => ["seeding", "running"].includes(status.state);

export const live = (status) => status.learners.filter((learner) => learner.state === "live");

export function tooFew(status) {
  return isUnderWay(status) && live(status).length < status.quorum;
}

function leader(seen, status) {
  if (status.role === "leading") return ["leader", `term ${count(status.claim?.term ?? 0)}`, "good"];
  if (seen.leader) return ["follows", `term ${count(seen.leader.term)}`, "good"];
  return ["leader", "nobody is known to lead", "bad"];
}

function learners(status) {
  const number = live(status).length;
  const tone = tooFew(status) ? "bad" : number ? "good" : "";
  return ["learners", `${count(number)} of ${count(status.learners.length)} live`, tone];
}

function standby(seen, status) {
  const backing = status.replication;
  if (!backing || !seen.peers.length) return null;
  const number = backing.replicas.filter((standby) => standby.in_sync).length;
  if (number) return ["standby", number > 1 ? `${count(number)} in sync` : "in sync", "good"];
  return ["standby", "none in sync", "bad"];
}

function store({ store }) {
  if (store.state === "unknown") return null; // who follows says nothing of it
  return ["store", store.reason ? `failing: ${store.reason}` : store.state,
    store.state === "working" ? "good" : "bad"];
}

function redis({ redis }) {
  if (!redis) return null;
  return ["Redis", redis.state, { working: "good", failing: "bad" }[redis.state]];
}

// Merging that waits for a store, a standby, a lease or learners, not for the next step.
const HOLDS = ["quorum", "replica", "lease", "persist", "store_lost"];
const PATIENCE_S = 10;

function held(status) {
  const found = status.waits.filter(
    (wait) => HOLDS.includes(wait.reason) && wait.seconds > PATIENCE_S,
  );
  if (!found.length || !isUnderWay(status)) return null;
  return ["merging", `waits for ${found[0].reason}`, "bad"];
}

export function showHealth(seen, status) {
  const leads = status.role === "leading";
  const signs = [
    leader(seen, status),
    ...(leads ? [learners(status), held(status), standby(seen, status)] : []),
    store(seen),
    redis(seen),
  ];
  fill(
    byId("signs"),
    signs.filter((sign) => sign !== null).map((sign) => [sign[0], sign]),
    () => {
      const line = make("li");
      line.append(make("span", "what"), " ", make("b"));
      return line;
    },
    (line, [what, text, tone]) => {
      setText(line.firstChild, what);
      setText(line.lastChild, text);
      setTone(line, tone);
    },
  );
}
