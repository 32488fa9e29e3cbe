// Fills the page. What comes from outside only ever becomes text (textContent) or an attribute that
// no browser runs; nodes are kept as long as what they stand for, so that nothing jumps or flickers.

const kept = new WeakMap();

export const byId = (id) => document.getElementById(id);

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

// One child per entry ([key, value]) in the order of the entries.
export function fill(parent, entries, create, update) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map();
  let place = parent.firstChild;
  for (const [key, value] of entries) {
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

// A table; a column is {name, text, tone, title, number}: functions of an entry, but for the name.
export function table(head, body, columns, entries) {
  fill(
    head,
    columns.map((column) => [column.name, column]),
    () => document.createElement("th"),
    (cell, column) => {
      cell.scope = "col";
      cell.className = column.number ? "number" : "";
      setText(cell, column.name);
    },
  );
  fill(
    body,
    entries,
    () => document.createElement("tr"),
    (row, entry) =>
      fill(
        row,
        columns.map((column) => [column.name, column]),
        () => document.createElement("td"),
        (cell, column) => {
          cell.className = column.number ? "number" : "";
          cell.dataset.name = column.name;
          setText(cell, column.text(entry));
          setTone(cell, column.tone?.(entry));
          setTitle(cell, column.title?.(entry) ?? "");
        },
      ),
  );
}

// A list of figures: [label, value, tone].
export function figures(list, entries) {
  fill(
    list,
    entries.map((entry) => [entry[0], entry]),
    () => {
      const pair = document.createElement("div");
      pair.append(document.createElement("dt"), document.createElement("dd"));
      return pair;
    },
    (pair, [label, value, tone]) => {
      setText(pair.firstChild, label);
      setText(pair.lastChild, value);
      setTone(pair.lastChild, tone);
    },
  );
}
