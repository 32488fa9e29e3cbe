// Keeps a connection to /events, shows what comes, and says when nothing comes any more.

import { byId, setText } from "./dom.js";
import { draw } from "./curve.js";
import { show } from "./sections.js";
import { duration } from "./words.js";

const RECONNECT_AFTER_S = 10;
const AGAIN_MS = 3000;

let source = null;
let seen = null;
let heardAt = performance.now();
let triedAt = performance.now();

function connect() {
  source?.close();
  triedAt = performance.now();
  const mine = new EventSource("events");
  source = mine;
  mine.addEventListener("status", (message) => {
    seen = JSON.parse(message.data);
    heardAt = triedAt = performance.now();
    show(seen);
    sayConnection();
  });
  mine.addEventListener("error", () => {
    // A browser tries again by itself, but not where it was refused.
    if (mine === source && mine.readyState === EventSource.CLOSED) setTimeout(again, AGAIN_MS, mine);
  });
}

function again(old) {
  if (old === source && !document.hidden) connect();
}

function sayConnection() {
  const age = (performance.now() - heardAt) / 1000;
  const late = age > (seen ? 2 * seen.pause_s + 2 : 5);
  const line = byId("connection");
  line.className = `connection ${late ? "lost" : seen ? "live" : "waiting"}`;
  document.body.classList.toggle("stale", late);
  if (!late) setText(line, seen ? "live" : "connecting");
  else if (!seen) setText(line, "not connected, nothing heard yet");
  else setText(line, `not connected, last heard ${duration(age)} ago`);
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

connect();
setInterval(watch, 500);
