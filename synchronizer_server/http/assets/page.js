// Keeps a connection to /events, shows what comes, and says when nothing comes any more.

import { byId, setText } from "./dom.js";
import { draw, listen } from "./curve.js";
import { show } from "./sections.js";
import { duration } from "./words.js";

const FORMAT = 1; // of what is shown here; a synchronizer that was replaced may send another one
const RECONNECT_AFTER_S = 10;
const AGAIN_MS = 3000;

let source = null;
let seen = null;
let failure = "";
let heardAt = performance.now();
let triedAt = performance.now();

function connect() {
  source?.close();
  triedAt = performance.now();
  const mine = new EventSource("events");
  source = mine;
  mine.addEventListener("status", (message) => {
    heardAt = triedAt = performance.now();
    take(message.data);
    sayConnection();
  });
  mine.addEventListener("error", () => {
    // A browser tries again by itself, but not where it was refused.
    if (mine === source && mine.readyState === EventSource.CLOSED) setTimeout(again, AGAIN_MS, mine);
  });
}

function take(text) {
  try {
    seen = JSON.parse(text);
    failure = seen.format === FORMAT ? "" : "this page is of another version";
    show(seen);
  } catch (error) {
    failure = "part of this cannot be shown";
    console.error(error);
  }
}

function again(old) {
  if (old === source && !document.hidden) connect();
}

function sayConnection() {
  const age = (performance.now() - heardAt) / 1000;
  const late = age > (seen ? 2 * seen.pause_s + 2 : 5);
  const state = late ? "lost" : failure ? "wrong" : seen ? "live" : "waiting";
  byId("connection").className = `connection ${state}`;
  document.body.classList.toggle("stale", late);
  // The age is no part of what is read out: it changes all the time.
  setText(byId("age"), !late ? "" : seen ? `, last heard ${duration(age)} ago` : ", nothing heard yet");
  const words = {
    lost: "not connected", wrong: `${failure}: reload it`, live: "live", waiting: "connecting",
  };
  setText(byId("word"), words[state]);
  return late;
}

function watch() {
  // A synchronizer that is frozen, or a link that is cut, ends no connection by itself.
  const tried = (performance.now() - triedAt) / 1000;
  if (sayConnection() && tried > RECONNECT_AFTER_S && !document.hidden) connect();
}

document.addEventListener("visibilitychange", () => {
  // Nobody looks: the connection is left to others.
  if (document.hidden) source?.close();
  else connect();
});
window.addEventListener("resize", () => seen && draw(byId("loss"), seen.losses));
listen(byId("loss"));

connect();
setInterval(watch, 500);
