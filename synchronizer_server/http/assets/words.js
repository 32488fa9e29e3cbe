// Numbers and times for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "kB", "MB", "GB", "TB"];

export const count = (number) => whole.format(number);

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

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

// learner-2 before learner-10.
export const byName = new Intl.Collator("en", { numeric: true }).compare;

export const names = (list, most = 8) =>
  list.length > most
    ? `${list.slice(0, most).join(", ")} and ${list.length - most} more`
    : list.join(", ");
