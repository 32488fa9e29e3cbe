// Fills the page. What comes from outside only ever becomes text (textContent) or an attribute that
// no browser runs; nodes are kept as long as what they stand for, so that nothing jumps or flickers.

const kept = new WeakMap();

export const byId = (id) => document.getElementById(id);

export function make(name, ...classes) {
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setTone(node, tone) {
  const name = tone ?? "";
  if ((node.dataset.tone ?? "") !== name) node.dataset.tone = name;
}

export function setTitle(node, title) {
  if (node.title !== title) node.title = title;
}

function setRole(node, role) {
  if (node.getAttribute("role") !== role) node.setAttribute("role", role);
}

// One child per entry ([key, value]) in the order of the entries.
export function fill(parent, entries, create, update) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map();
  let place = parent.firstChild;
  for (const [wanted, value] of entries) {
    const key = now.has(wanted) ? `${wanted} (${now.size})` : wanted;
    const child = before.get(key) ?? create(value);
    before.delete(key);
    now.set(key, child);
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
    update(child, value);
  }
  for (const child of before.values()) child.remove();
  kept.set(parent, now);
}

// A table; a column is {name, what, number, code} and functions of an entry: text, more, bar, tone,
// title. On a phone rows are cards, of which only roles say that they are a table.
export function table(head, body, columns, entries) {
  fill(
    head,
    columns.map((column) => [column.name, column]),
    () => make("th"),
    (cell, column) => {
      cell.scope = "col";
      setRole(cell, "columnheader");
      cell.className = column.number ? "number" : "";
      setText(cell, column.name);
      setTitle(cell, column.what ?? "");
    },
  );
  fill(
    body,
    entries,
    () => {
      const row = make("tr");
      setRole(row, "row");
      return row;
    },
    (row, entry) =>
      fill(
        row,
        columns.map((column, i) => [column.name, [column, i === 0]]),
        ([column, isFirst]) => newCell(column, isFirst),
        (cell, [column]) => showCell(cell, column, entry),
      ),
  );
}

function newCell(column, isFirst) {
  const cell = make(isFirst ? "th" : "td");
  if (isFirst) cell.scope = "row";
  setRole(cell, isFirst ? "rowheader" : "cell");
  cell.dataset.name = column.name;
  cell.className = column.number ? "number" : "";
  cell.append(make("span", column.code ? "value code" : "value"));
  if (column.more) cell.append(make("span", "more"));
  if (column.bar) cell.append(make("span", "bar"));
  return cell;
}

function showCell(cell, column, entry) {
  const [value, other] = cell.children;
  setText(value, column.text(entry));
  setTone(value, column.tone?.(entry));
  setTitle(cell, column.title?.(entry) ?? "");
  if (column.more) setText(other, column.more(entry));
  if (column.bar) other.style.setProperty("--part", column.bar(entry).toFixed(3));
}

// A list of figures: [label, value, tone].
export function figures(list, entries) {
  fill(
    list,
    entries.map((entry) => [entry[0], entry]),
    () => {
      const pair = make("div");
      pair.append(make("dt"), make("dd"));
      return pair;
    },
    (pair, [label, value, tone]) => {
      setText(pair.firstChild, label);
      setText(pair.lastChild, value);
      setTone(pair.lastChild, tone);
    },
  );
}
