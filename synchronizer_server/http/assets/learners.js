// The table of learners, and who of them is left out.

import { byId, setText, table } from "./dom.js";
import { byName, count, cut, dash, duration, loss, names, percent } from "./words.js";

const MOST_LEARNERS = 300;
const MOST_NAMED = 4;
const HAS_LEFT = ["left", "drained"];
const TONES = {
  live: "good", joined: "warning", expected: "warning", disconnected: "warning", gone: "bad",
};

const labels = (learner) =>
  Object.entries(learner.labels).map(([key, value]) => `${key}=${value}`).join(" ");

// What a name leads to, and never what every object has under such a name.
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

const columns = [
  {
    name: "learner",
    text: ({ learner }) => learner.learner_id,
    more: ({ learner }) => cut(labels(learner), 80),
    title: ({ learner }) => labels(learner),
  },
  {
    name: "state",
    text: ({ learner }) => (learner.quarantine ? "quarantine" : learner.state),
    tone: ({ learner }) => (learner.quarantine ? "bad" : TONES[learner.state]),
    title: ({ learner }) => learner.quarantine,
  },
  {
    name: "incarnation",
    what: "term in which this life began, and its number",
    number: true,
    text: ({ learner }) => dash(learner.incarnation, (x) => `${x.term}.${x.number}`),
  },
  { name: "step", number: true, text: ({ learner }) => count(learner.local_step) },
  { name: "loss", number: true, text: ({ learner }) => dash(learner.loss, (x) => loss(x)) },
  { name: "tokens/s", number: true, text: ({ learner }) => count(learner.tokens_per_second) },
  {
    name: "behind",
    what: "fragments whose published version it has not applied yet",
    number: true,
    text: ({ learner }) =>
      HAS_LEFT.includes(learner.state) ? "-" : String(learner.versions_behind),
  },
  {
    name: "weight",
    what: "mean share in the weight of the last rounds",
    number: true,
    text: ({ share }) => dash(share, percent),
    bar: ({ share }) => share ?? 0,
  },
  {
    name: "merged",
    what: "pushes merged, and pushes left out",
    number: true,
    text: ({ learner }) => count(learner.accepted),
    more: ({ learner }) => {
      const rest = learner.dropped + learner.refused;
      return rest ? `${count(rest)} left out` : "";
    },
    title: ({ learner }) => `${learner.dropped} dropped, ${learner.refused} refused`,
  },
  {
    name: "last refusal",
    code: true,
    text: ({ learner }) => learner.last_reason || "-",
    tone: ({ learner }) => (learner.last_reason ? "warning" : ""),
  },
  { name: "heard", number: true, text: ({ learner }) => `${duration(learner.heard_seconds_ago)} ago` },
];

const leased = {
  name: "data lease",
  number: true,
  text: ({ learner }) =>
    learner.data_stop ? `${count(learner.data_position)} of ${count(learner.data_stop)}` : "-",
};

// Who has left comes last; where not all can be shown, who is in trouble comes first.
function rank(learner, areMany) {
  if (HAS_LEFT.includes(learner.state)) return 2;
  return areMany && learner.state === "live" && !learner.quarantine ? 1 : 0;
}

export function showLearners(seen, status) {
  const areMany = status.learners.length > MOST_LEARNERS;
  const sorted = [...status.learners].sort(
    (a, b) => rank(a, areMany) - rank(b, areMany) || byName(a.learner_id, b.learner_id),
  );
  table(
    byId("learner-head"),
    byId("learners"),
    status.data?.mode === "leases" ? [...columns, leased] : columns,
    sorted.slice(0, MOST_LEARNERS).map((learner) => [
      learner.learner_id,
      { learner, share: own(seen.shares, learner.learner_id) },
    ]),
  );
  const out = sorted.filter((learner) => learner.quarantine);
  const lines = out
    .slice(0, MOST_NAMED)
    .map((learner) => `${learner.learner_id} is left out: ${learner.quarantine}`);
  if (out.length > MOST_NAMED) {
    lines.push(`left out, too: ${names(out.slice(MOST_NAMED).map((x) => x.learner_id))}`);
  }
  if (areMany) {
    lines.push(
      `those in trouble first; ${count(sorted.length - MOST_LEARNERS)} more are in status.json`,
    );
  }
  if (!sorted.length) lines.push("none has joined yet");
  setText(byId("learners-note"), lines.join("; "));
}
