// What is shown of a look at the fleet: docs/status-page.md describes the object.

import { draw } from "./curve.js";
import { byId, figures, fill, make, setText, setTitle, setTone, table } from "./dom.js";
import { isUnderWay, showHealth, tooFew, live } from "./health.js";
import { showLearners } from "./learners.js";
import {
  count, cut, dash, duration, loss, names, percent, plural, size, step, tally,
} from "./words.js";

const MOST_FRAGMENTS = 512;
const MOST_AWAITED = 8;
const FEWEST_ROUNDS = 10; // from which their pace says how long the rest takes
// States of a round in which not all learners are asked yet: it wants as many as the quorum.
const ASKING = ["collecting", "suspended", "grace"];
const GOOD = "good";
const WARNING = "warning";
const BAD = "bad";
const RUN_TONES = { running: GOOD, complete: GOOD, following: "" };

// One that fails keeps none of the others from being shown.
export function show(seen) {
  const status = seen.status;
  const leads = status.role === "leading";
  // Who follows knows rounds and versions, and nothing of those who train.
  for (const id of ["figures", "loss-section", "learner-section", "round-section"]) {
    byId(id).hidden = !leads;
  }
  const parts = [
    showHead, showHealth, showProgress, showWaits, showLosses, showLearners, showRounds,
    showFragments, showSynchronizers, showStorage, showData, showEvents,
  ];
  const failures = [];
  for (const part of parts) {
    try {
      part(seen, status);
    } catch (error) {
      failures.push(error);
    }
  }
  if (failures.length) throw failures[0];
}

function showHead(seen, status) {
  const name = status.run_id || "Decoupled DiLoCo";
  setText(byId("run"), name);
  document.title = `${count(status.global_step)} ${status.state} - ${name}`;
  const badge = byId("state");
  badge.hidden = !status.state;
  setText(badge, status.state);
  setTone(badge, RUN_TONES[status.state] ?? WARNING);
  setText(byId("leader"), leaderText(seen, status));
}

function leaderText(seen, status) {
  const leader = seen.leader;
  if (status.role === "leading") {
    return `This synchronizer (${seen.address}) leads in term ${leader?.term}.`;
  }
  const own = `This synchronizer (${seen.address}) ${status.role ? "follows" : "starts"}`;
  if (!leader) return `${own}; nobody is known to lead.`;
  const where = leader.address ? ` at ${leader.address}` : "";
  return `${own}; ${leader.leader_id} leads in term ${leader.term}${where} and knows the learners.`;
}

function showProgress(seen, status) {
  const total = status.total_global_steps;
  setText(byId("step"), count(status.global_step));
  setText(byId("of"), total ? progressText(status, total) : "global steps, without end");
  const bar = byId("progress");
  bar.hidden = !total;
  bar.max = total || 1;
  bar.value = Math.min(status.global_step, total || 1);
  figures(byId("figures"), paceFigures(seen, status));
  const reasons = tally(status.totals?.pushes_by_reason ?? {});
  setText(byId("figures-note"), reasons ? `pushes left out: ${reasons}` : "");
}

function progressText(status, total) {
  const done = percent(Math.min(status.global_step / total, 1));
  const text = `of ${count(total)} global steps, ${done}`;
  const rounds = status.totals?.rounds ?? 0;
  const left = total - status.global_step;
  if (status.state !== "running" || rounds < FEWEST_ROUNDS || left <= 0) return text;
  return `${text}, about ${duration((left * status.uptime_seconds) / rounds)} to go`;
}

function paceFigures(seen, status) {
  const here = live(status);
  const tokens = here.reduce((sum, learner) => sum + learner.tokens_per_second, 0);
  const { totals, pace } = status;
  return [
    ["learners live", `${count(here.length)} of ${count(status.learners.length)}`,
      tooFew(status) ? BAD : isUnderWay(status) ? GOOD : ""],
    ["quorum", count(status.quorum)],
    ["participation", totals?.live ? percent(totals.participation) : "-"],
    ["tokens/s", count(tokens)],
    ["tokens merged", count(totals?.tokens_merged ?? 0)],
    ["measured H", totals?.measured_h ? totals.measured_h.toFixed(1) : "-"],
    ["inner step", pace?.step_seconds ? step(pace.step_seconds) : "-"],
    ["grace window", pace?.grace_seconds ? step(pace.grace_seconds) : "-"],
    ["last published", dash(seen.published_s, (s) => `${duration(s)} ago`)],
    ["rounds this term", count(totals?.rounds ?? 0)],
    ["pushed up", size(totals?.bytes_up ?? 0)],
    ["sent down", size(totals?.bytes_down ?? 0)],
    ["term began", `${duration(status.uptime_seconds)} ago`],
  ];
}

function showWaits(_, status) {
  // Rounds say theirs, and the title says who is followed.
  const waits = status.waits.filter(
    (wait) => !wait.subject.startsWith("round ") && wait.reason !== "following",
  );
  byId("waits").hidden = !waits.length;
  fill(
    byId("wait-list"),
    waits.map((wait) => [wait.subject, wait]),
    () => make("li"),
    (line, wait) => setText(line, `${wait.subject}: ${waitText(wait)}`),
  );
}

function waitText(wait) {
  const detail = wait.detail ? `: ${cut(wait.detail)}` : "";
  return `${wait.reason}${detail} (${duration(wait.seconds)})`;
}

function showLosses(seen) {
  const last = seen.losses.at(-1);
  setText(
    byId("loss-note"),
    last
      ? `${loss(last[1], 4)} nats per token at global step ${count(last[0])}; median of the ` +
          "contributors, since this synchronizer began to lead"
      : "known once learners contribute and report a loss",
  );
  draw(byId("loss"), seen.losses);
}

function wanted(round, status) {
  const asked = round.pending.length + round.accepted.length;
  return ASKING.includes(round.state) ? Math.max(asked, status.quorum) : asked;
}

function showRounds(_, status) {
  const waits = new Map(status.waits.map((wait) => [wait.subject, wait]));
  const columns = [
    { name: "round", number: true, text: (round) => count(round.global_step) },
    { name: "fragment", number: true, text: (round) => count(round.fragment) },
    { name: "state", text: (round) => round.state },
    {
      name: "in",
      what: "contributions accepted, of those wanted",
      number: true,
      text: (round) => `${count(round.accepted.length)} of ${count(wanted(round, status))}`,
      title: (round) => names(round.accepted, 50),
    },
    {
      name: "awaited",
      text: (round) => names(round.pending, MOST_AWAITED) || "-",
      title: (round) => names(round.pending, 50),
    },
    {
      name: "why",
      text: (round) => dash(waits.get(`round ${round.global_step}`), waitText),
    },
  ];
  table(
    byId("round-head"),
    byId("rounds"),
    columns,
    status.rounds.map((round) => [round.global_step, round]),
  );
  const inFlight = new Set(status.rounds.map((round) => `round ${round.global_step}`));
  const next = status.waits.filter(
    (wait) => wait.subject.startsWith("round ") && !inFlight.has(wait.subject),
  );
  const lines = next.map((wait) => `${wait.subject}: ${waitText(wait)}`);
  if (!status.rounds.length) lines.unshift("none");
  setText(byId("rounds-note"), lines.join("; "));
}

function showFragments(_, status) {
  const rounds = new Map(status.rounds.map((round) => [round.fragment, round]));
  const known = status.versions.filter((entry) => entry.version);
  fill(
    byId("fragments"),
    known.slice(0, MOST_FRAGMENTS).map((entry) => [entry.fragment, entry]),
    () => {
      const cell = make("li");
      cell.append(make("span"), make("b"));
      return cell;
    },
    (cell, { fragment, version }) => {
      const round = rounds.get(fragment);
      setText(cell.firstChild, String(fragment));
      setText(cell.lastChild, count(version.global_step));
      cell.classList.toggle("busy", Boolean(round));
      setTitle(
        cell,
        `fragment ${fragment}: version ${version.term}.${version.global_step}, ` +
          `${version.digest.slice(0, 12)}${round ? `, round ${round.global_step} ${round.state}` : ""}`,
      );
    },
  );
  const rest = known.length - MOST_FRAGMENTS;
  setText(
    byId("fragments-note"),
    known.length
      ? "global step of each fragment's version; outlined: in a round now" +
          (rest > 0 ? `; ${count(rest)} more are in status.json` : "")
      : "no fragment has a version yet",
  );
}

function showSynchronizers(seen, status) {
  const backing = status.replication;
  const entries = [["role", status.role || "starting"], ["term", String(seen.leader?.term ?? "-")]];
  if (backing) {
    const lost = backing.unsafe_rounds;
    entries.push(
      ["replication", backing.mode],
      ["lease", backing.lease_held ? `held, ${backing.lease_seconds.toFixed(1)} s` : "not held",
        backing.lease_held ? GOOD : BAD],
      ["a take-over would lose", plural(lost, "round"), lost ? BAD : GOOD],
    );
  }
  figures(byId("backing"), entries);
  const columns = [
    { name: "standby", text: (standby) => standby.standby_id },
    {
      name: "state",
      text: standbyState,
      tone: (standby) => (standby.in_sync && standby.connected ? GOOD : BAD),
    },
    { name: "acknowledged", number: true, text: (standby) => count(standby.acked_global_step) },
  ];
  const standbys = (backing?.replicas ?? []).map((standby) => [standby.standby_id, standby]);
  table(byId("standby-head"), byId("standbys"), standbys.length ? columns : [], standbys);
  setText(byId("standbys-note"), synchronizersNote(seen, status, standbys.length));
}

function standbyState(standby) {
  const sync = standby.in_sync ? "in sync" : "not in sync";
  return standby.connected ? sync : `${sync}, not connected`;
}

function synchronizersNote(seen, status, numStandbys) {
  if (!seen.peers.length) return "no standby is configured";
  const peers = `peers: ${names(seen.peers)}`;
  if (status.role !== "leading") return `${peers}; the leader knows who is in sync`;
  return numStandbys ? peers : `no standby is connected; ${peers}`;
}

function showStorage(seen) {
  const { redis, store } = seen;
  const tones = { working: GOOD, failing: BAD };
  figures(byId("storage"), [
    ["Redis", redis ? redis.state : "none, membership is in memory", tones[redis?.state]],
    ...(redis?.detail ? [["Redis says", cut(redis.detail), BAD]] : []),
    ...(redis ? [["Redis at", redis.address]] : []),
    ["store", storeText(store), tones[store.state]],
    ["durability", store.durability],
    ["free space", dash(store.bytes_free, size)],
    ["directory", store.directory],
  ]);
}

function storeText(store) {
  if (store.state === "unknown") return "unknown while it follows";
  return store.reason ? `${store.state}: ${store.reason}` : store.state;
}

function showData(_, status) {
  const { snapshot, data } = status;
  const entries = [["last snapshot", snapshot?.complete || "none"]];
  if (snapshot?.pending) {
    entries.push(["snapshot under way", `${snapshot.pending}, for ${names(snapshot.awaited)}`]);
  }
  if (snapshot?.failure) {
    entries.push([`snapshot ${snapshot.last}`, `failed: ${cut(snapshot.failure)}`, BAD]);
  }
  const out = Object.entries(snapshot?.left_out ?? {}).map(([name, why]) => `${name} (${cut(why)})`);
  if (out.length) entries.push([`left out of ${snapshot.last}`, names(out), WARNING]);
  entries.push(["training data", data?.mode || "-"]);
  if (data?.mode === "leases") {
    entries.push(
      ["epoch", count(data.epoch)],
      ["samples free", count(data.num_free)],
      ["on lease", count(data.num_leased)],
      ["merged", count(data.num_merged)],
      ["given back", count(data.num_returned)],
    );
  }
  figures(byId("data"), entries);
}

function showEvents(seen) {
  setText(byId("events-note"), seen.events.length ? "" : "none since this process started");
  fill(
    byId("events"),
    seen.events.map((event) => [event.number, event]),
    () => {
      const line = make("li");
      line.append(make("time"), make("b"), make("span"));
      return line;
    },
    (line, event) => {
      const [when, subject, text] = line.children;
      const at = new Date(event.time * 1000);
      setText(when, `${duration(seen.time - event.time)} ago`);
      setTitle(when, at.toLocaleString());
      setText(subject, event.subject);
      setText(text, event.times > 1 ? `${event.text} (${count(event.times)} times)` : event.text);
    },
  );
}
