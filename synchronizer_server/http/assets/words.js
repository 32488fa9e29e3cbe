// Numbers and times for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const large = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "kB", "MB", "GB", "TB"];

// Large ones in short: nobody reads more, and who reports absurd ones takes no room.
export function count(number) {
  if (number < 1e9) return whole.format(number);
  return number < 1e15 ? large.format(number) : number.toExponential(1);
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export const percent = (share) =>
  `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function size(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit ? `${value.toFixed(1)} ${UNITS[unit]}` : `${whole.format(value)} B`;
}

export function duration(seconds) {
  if (seconds < 60) return `${whole.format(Math.max(seconds, 0))} s`;
  const all = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(all / 3600);
  const minutes = Math.floor(all / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}

export const step = (seconds) => (seconds < 10 ? `${seconds.toFixed(3)} s` : duration(seconds));

export const loss = (value, digits = 3) =>
  Math.abs(value) < 1e5 ? value.toFixed(digits) : value.toExponential(1);

export const dash = (value, text) =>
  value === null || value === undefined ? "-" : text(value);

// learner-2 before learner-10.
export const byName = new Intl.Collator("en", { numeric: true }).compare;

export const names = (list, most = 8) =>
  list.length > most
    ? `${list.slice(0, most).join(", ")} and ${list.length - most} more`
    : list.join(", ");

export const cut = (text, most = 240) =>
  text.length > most ? `${text.slice(0, most)} ...` : text;

// "TOO_LATE 10, NON_FINITE 2" of {TOO_LATE: 10, NON_FINITE: 2}, the most frequent first.
export const tally = (numbers) =>
  Object.entries(numbers)
    .sort((a, b) => b[1] - a[1])
    .map(([what, number]) => `${what} ${count(number)}`)
    .join(", ");
