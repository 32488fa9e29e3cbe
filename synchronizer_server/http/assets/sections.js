// What is shown of a look at the fleet: docs/status-page.md describes the object.

import { draw } from "./curve.js";
import { byId, figures, fill, setText, setTitle, setTone, table } from "./dom.js";
import { byName, count, duration, names, percent, size, step } from "./words.js";

const MOST_LEARNERS = 300;
const MOST_FRAGMENTS = 512;
const MOST_AWAITED = 8;
// States of a round in which not all learners are asked yet: it wants as many as the quorum.
const ASKING = ["collecting", "suspended", "grace"];
const HAS_LEFT = ["left", "drained"];
const GOOD = "good";
const WARNING = "warning";
const BAD = "bad";
const STATE_TONES = {
  live: GOOD, joined: WARNING, expected: WARNING, disconnected: WARNING, gone: BAD,
};
const RUN_TONES = { running: GOOD, complete: GOOD, following: "" };

const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const dash = (value, text) => (value === null || value === undefined ? "-" : text(value));

export function show(seen) {
  const status = seen.status;
  const leads = status.role === "leading";
  // Who follows knows rounds and versions, and nothing of those who train.
  for (const id of ["figures", "learner-section", "round-section"]) byId(id).hidden = !leads;
  byId("loss-section").hidden = !leads && !seen.losses.length;
  showHead(seen, status);
  showProgress(seen, status);
  showWaits(status);
  showLosses(seen);
  showLearners(seen, status);
  showRounds(status);
  showFragments(status);
  showSynchronizers(seen, status);
  showHealth(seen);
  showData(status);
  showEvents(seen);
}

function showHead(seen, status) {
  const name = status.run_id || "Decoupled DiLoCo";
  setText(byId("run"), name);
  document.title = `${status.global_step} ${status.state} - ${name}`;
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
  setText(
    byId("of"),
    total
      ? `of ${count(total)} global steps, ${percent(Math.min(status.global_step / total, 1))}`
      : "global steps, without end",
  );
  const bar = byId("progress");
  bar.hidden = !total;
  bar.max = total || 1;
  bar.value = Math.min(status.global_step, total || 1);
  figures(byId("figures"), paceFigures(seen, status));
}

function paceFigures(seen, status) {
  const live = status.learners.filter((learner) => learner.state === "live");
  const tokens = live.reduce((sum, learner) => sum + learner.tokens_per_second, 0);
  const { totals, pace } = status;
  const few = live.length < status.quorum;
  return [
    ["learners live", `${live.length} of ${status.learners.length}`, few ? BAD : GOOD],
    ["quorum", String(status.quorum)],
    ["tokens/s", count(tokens)],
    ["participation", totals?.live ? percent(totals.participation) : "-"],
    ["measured H", totals?.measured_h ? totals.measured_h.toFixed(1) : "-"],
    ["inner step", pace?.step_seconds ? step(pace.step_seconds) : "-"],
    ["grace window", pace?.grace_seconds ? step(pace.grace_seconds) : "-"],
    ["last published", dash(seen.published_s, (s) => `${duration(s)} ago`)],
    ["rounds merged", count(totals?.rounds ?? 0)],
    ["up / down", `${size(totals?.bytes_up ?? 0)} / ${size(totals?.bytes_down ?? 0)}`],
    ["up for", duration(status.uptime_seconds)],
  ];
}

function showWaits(status) {
  const waits = status.waits.filter((wait) => !wait.subject.startsWith("round "));
  byId("waits").hidden = !waits.length;
  fill(
    byId("wait-list"),
    waits.map((wait) => [wait.subject, wait]),
    () => document.createElement("li"),
    (line, wait) => setText(line, `${wait.subject}: ${waitText(wait)}`),
  );
}

function waitText(wait) {
  const detail = wait.detail ? `: ${wait.detail}` : "";
  return `${wait.reason}${detail} (${duration(wait.seconds)})`;
}

function showLosses(seen) {
  const last = seen.losses.at(-1);
  setText(
    byId("loss-note"),
    last
      ? `${last[1].toFixed(4)} nats per token at global step ${count(last[0])}; median of the ` +
          "contributors, since this synchronizer began to lead"
      : "known once learners contribute and report a loss",
  );
  draw(byId("loss"), seen.losses);
}

const learnerColumns = [
  {
    name: "learner",
    text: ({ learner }) => learner.learner_id,
    title: ({ learner }) =>
      Object.entries(learner.labels).map(([key, value]) => `${key}=${value}`).join(" "),
  },
  {
    name: "state",
    text: ({ learner }) => (learner.quarantine ? "quarantine" : learner.state),
    tone: ({ learner }) => (learner.quarantine ? BAD : STATE_TONES[learner.state]),
    title: ({ learner }) => learner.quarantine,
  },
  {
    name: "incarnation",
    number: true,
    text: ({ learner }) => dash(learner.incarnation, (x) => `${x.term}.${x.number}`),
  },
  { name: "step", number: true, text: ({ learner }) => count(learner.local_step) },
  { name: "loss", number: true, text: ({ learner }) => dash(learner.loss, (x) => x.toFixed(3)) },
  { name: "tokens/s", number: true, text: ({ learner }) => count(learner.tokens_per_second) },
  {
    name: "behind",
    number: true,
    text: ({ learner }) =>
      HAS_LEFT.includes(learner.state) ? "-" : String(learner.versions_behind),
    title: () => "fragments whose published version it has not applied yet",
  },
  {
    name: "weight",
    number: true,
    text: ({ share }) => dash(share, percent),
    title: () => "mean share in the weight of the last rounds",
  },
  {
    name: "merged",
    number: true,
    text: ({ learner }) => {
      const rest = learner.dropped + learner.refused;
      return rest ? `${learner.accepted} (-${rest})` : String(learner.accepted);
    },
    title: ({ learner }) => `${learner.dropped} dropped, ${learner.refused} refused`,
  },
  {
    name: "last refusal",
    text: ({ learner }) => learner.last_reason || "-",
    tone: ({ learner }) => (learner.last_reason ? WARNING : ""),
  },
  {
    name: "heard",
    number: true,
    text: ({ learner }) => `${duration(learner.heard_seconds_ago)} ago`,
  },
];

function showLearners(seen, status) {
  const sorted = [...status.learners].sort((a, b) => byName(a.learner_id, b.learner_id));
  const columns = [...learnerColumns];
  if (status.data?.mode === "leases") {
    columns.push({
      name: "data lease",
      number: true,
      text: ({ learner }) =>
        learner.data_stop
          ? `${count(learner.data_position)} of ${count(learner.data_stop)}`
          : "-",
    });
  }
  table(
    byId("learner-head"),
    byId("learners"),
    columns,
    sorted
      .slice(0, MOST_LEARNERS)
      .map((learner) => [learner.learner_id, { learner, share: seen.shares[learner.learner_id] }]),
  );
  const left = sorted.filter((learner) => learner.quarantine);
  const lines = left.map((learner) => `${learner.learner_id} is left out: ${learner.quarantine}`);
  if (sorted.length > MOST_LEARNERS) {
    lines.push(`${sorted.length - MOST_LEARNERS} more are in status.json`);
  }
  if (!sorted.length) lines.push("none has joined yet");
  setText(byId("learners-note"), lines.join("; "));
}

function wanted(round, status) {
  const asked = round.pending.length + round.accepted.length;
  return ASKING.includes(round.state) ? Math.max(asked, status.quorum) : asked;
}

function showRounds(status) {
  const waits = new Map(status.waits.map((wait) => [wait.subject, wait]));
  const columns = [
    { name: "round", number: true, text: (round) => count(round.global_step) },
    { name: "fragment", number: true, text: (round) => String(round.fragment) },
    { name: "state", text: (round) => round.state },
    {
      name: "in",
      number: true,
      text: (round) => `${round.accepted.length} of ${wanted(round, status)}`,
      title: (round) => round.accepted.join(", "),
    },
    { name: "awaited", text: (round) => names(round.pending, MOST_AWAITED) || "-" },
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

function showFragments(status) {
  const rounds = new Map(status.rounds.map((round) => [round.fragment, round]));
  const known = status.versions.filter((entry) => entry.version);
  fill(
    byId("fragments"),
    known.slice(0, MOST_FRAGMENTS).map((entry) => [entry.fragment, entry]),
    () => {
      const cell = document.createElement("li");
      cell.append(document.createElement("span"), document.createElement("b"));
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
          (rest > 0 ? `; ${rest} more are in status.json` : "")
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
      name: "in sync",
      text: (standby) => (standby.in_sync ? "in sync" : "not in sync"),
      tone: (standby) => (standby.in_sync ? GOOD : BAD),
    },
    {
      name: "connection",
      text: (standby) => (standby.connected ? "connected" : "not connected"),
      tone: (standby) => (standby.connected ? GOOD : BAD),
    },
    { name: "acknowledged", number: true, text: (standby) => count(standby.acked_global_step) },
  ];
  const standbys = (backing?.replicas ?? []).map((standby) => [standby.standby_id, standby]);
  table(byId("standby-head"), byId("standbys"), standbys.length ? columns : [], standbys);
  setText(byId("standbys-note"), synchronizersNote(seen, status, standbys.length));
}

function synchronizersNote(seen, status, numStandbys) {
  if (!seen.peers.length) return "no standby is configured";
  const peers = `peers: ${seen.peers.join(", ")}`;
  if (status.role !== "leading") return `${peers}; the leader knows who is in sync`;
  return numStandbys ? peers : `no standby is connected; ${peers}`;
}

function showHealth(seen) {
  const { redis, store } = seen;
  const tones = { reachable: GOOD, unreachable: BAD };
  figures(byId("health"), [
    ["Redis", redis ? `${redis.state}, ${redis.address}` : "none: membership is in memory",
      tones[redis?.state]],
    ...(redis?.detail ? [["Redis says", redis.detail, BAD]] : []),
    ["store", store.reason ? `${store.state}: ${store.reason}` : store.state,
      store.state === "working" ? GOOD : BAD],
    ["durability", store.durability],
    ["free space", dash(store.bytes_free, size)],
    ["directory", store.directory],
  ]);
}

function showData(status) {
  const { snapshot, data } = status;
  const entries = [["last snapshot", snapshot?.complete || "none"]];
  if (snapshot?.pending) {
    entries.push(["snapshot under way", `${snapshot.pending}, for ${names(snapshot.awaited)}`]);
  }
  if (snapshot?.failure) {
    entries.push([`snapshot ${snapshot.last}`, `failed: ${snapshot.failure}`, BAD]);
  }
  const out = Object.entries(snapshot?.left_out ?? {}).map(([name, why]) => `${name} (${why})`);
  if (out.length) entries.push([`left out of ${snapshot.last}`, names(out), WARNING]);
  entries.push(["training data", data?.mode || "-"]);
  if (data?.mode === "leases") {
    entries.push(
      ["epoch", String(data.epoch)],
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
      const line = document.createElement("li");
      line.append(...["time", "b", "span"].map((name) => document.createElement(name)));
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
