"use strict";
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const one = (id) => document.getElementById(id);

/* Light, dark, or as the system has it. */
const themes = ["system", "light", "dark"];
const remembered = { get: () => { try { return localStorage.getItem("dtplan-theme"); } catch { return null; } },
  set: (name) => { try { localStorage.setItem("dtplan-theme", name); } catch { /* a file may have no storage */ } } };
function paint(name) {
  document.documentElement.style.colorScheme = name === "system" ? "" : name;
  one("theme").querySelector("span").textContent = name;
}
let theme = themes.includes(remembered.get()) ? remembered.get() : "system";
paint(theme);
one("theme").addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  remembered.set(theme);
  paint(theme);
});

/* The tree: a row is shown while all above it are open, or while the search wants it. */
const rows = all(".tree .row:not(.head)");
const above = (row) => row.dataset.parent ? one(row.dataset.parent) : null;
const isOpen = (row) => row.getAttribute("aria-expanded") === "true";
const setOpen = (row, open) => row.hasAttribute("aria-expanded") && row.setAttribute("aria-expanded", open);
const detail = (row) => row.querySelector(".detail");
const wanted = new Set();

function show() {
  const words = one("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const filtering = words.length > 0 || wanted.size > 0;
  const kept = new Set();
  let found = 0;
  for (const row of rows) {
    const text = row.dataset.words, layouts = text.split(" ");
    const fits = words.every((word) => text.includes(word)) && (!wanted.size || [...wanted].some((w) => layouts.includes(w)));
    if (filtering && fits) {
      found += 1;
      for (let at = row; at; at = above(at)) kept.add(at);
    }
  }
  for (const row of rows) {
    let open = true;
    for (let at = above(row); at; at = above(at)) open &&= isOpen(at);
    row.hidden = filtering ? !kept.has(row) : !open;
  }
  one("found").textContent = filtering ? `${found} of ${rows.length}` : "";
  if (!rows.some((row) => row.tabIndex === 0 && !row.hidden)) aim(rows.find((row) => !row.hidden), false);
}
function aim(row, focus = true) {
  if (!row) return;
  for (const other of rows) other.tabIndex = other === row ? 0 : -1;
  if (focus) { row.focus(); }
}
function reveal(row) {
  for (let at = above(row); at; at = above(at)) setOpen(at, true);
  one("search").value = "";
  wanted.clear();
  for (const button of all(".legend button")) button.setAttribute("aria-pressed", "false");
  show();
}
function toggleDetail(row) { detail(row).hidden = !detail(row).hidden; }

one("search").addEventListener("input", show);
for (const button of all(".legend button")) button.addEventListener("click", () => {
  const layout = button.dataset.layout, on = !wanted.has(layout);
  if (on) wanted.add(layout); else wanted.delete(layout);
  button.setAttribute("aria-pressed", on);
  show();
});
one("open-all").addEventListener("click", () => { rows.forEach((row) => setOpen(row, true)); show(); });
one("close-all").addEventListener("click", () => { rows.forEach((row) => setOpen(row, !above(row))); show(); });
for (const row of rows) row.addEventListener("click", (event) => {
  if (event.target.closest(".detail")) return;
  aim(row);
  if (row.hasAttribute("aria-expanded") && event.target.closest(".name")) { setOpen(row, !isOpen(row)); show(); }
  else toggleDetail(row);
});
document.querySelector(".tree").addEventListener("keydown", (event) => {
  const row = event.target.closest(".row");
  if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
  const shown = rows.filter((each) => !each.hidden), at = shown.indexOf(row);
  const act = {
    ArrowDown: () => aim(shown[at + 1]),
    ArrowUp: () => aim(shown[at - 1]),
    Home: () => aim(shown[0]),
    End: () => aim(shown[shown.length - 1]),
    ArrowRight: () => { if (row.hasAttribute("aria-expanded") && !isOpen(row)) { setOpen(row, true); show(); } else aim(rows.find((each) => above(each) === row && !each.hidden)); },
    ArrowLeft: () => { if (isOpen(row)) { setOpen(row, false); show(); } else aim(above(row)); },
    Enter: () => toggleDetail(row),
    " ": () => toggleDetail(row),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea");
  if (event.key === "/" && !typing) { event.preventDefault(); one("search").focus(); }
  if (event.target === one("search") && event.key === "Escape") { one("search").value = ""; show(); one("search").blur(); }
  if (event.target === one("search") && (event.key === "ArrowDown" || event.key === "Enter")) { event.preventDefault(); aim(rows.find((row) => !row.hidden && (!one("search").value || row.dataset.words.includes(one("search").value.toLowerCase())))); }
});
function follow() {
  const row = /^#m\d+$/.test(location.hash) && one(location.hash.slice(1));
  if (row) { reveal(row); detail(row).hidden = false; aim(row); row.scrollIntoView({ block: "center" }); }
}
window.addEventListener("hashchange", follow);

/* A rank: its groups in the mesh, its part of every matrix. */
const cells = all(".cell");
const sizes = { tp: 1 + Math.max(...cells.map((cell) => +cell.dataset.tp)) };
function pick(rank) {
  const self = cells.find((cell) => +cell.dataset.rank === rank);
  if (!self) { one("rank-says").textContent = "is not drawn"; return; }
  const mine = self.dataset;
  for (const cell of cells) {
    const its = cell.dataset, same = (...axes) => axes.every((axis) => its[axis] === mine[axis]);
    const group = cell === self ? "m-self" : same("replicate", "shard") ? "m-tp" : same("replicate", "tp") ? "m-shard" : same("shard", "tp") ? "m-replicate" : "";
    cell.setAttribute("class", `cell ${group}`);
  }
  for (const slice of all(".slice")) slice.classList.toggle("held", slice.dataset.tp === mine.tp);
  for (const name of all(".rank-name")) name.textContent = `rank ${rank}`;
  one("rank-says").textContent = `replica ${mine.replicate}, shard ${mine.shard}, tp ${mine.tp}, host ${mine.host}`;
  one("rank").value = rank;
}
for (const cell of cells) cell.addEventListener("click", () => pick(+cell.dataset.rank));
one("rank").addEventListener("input", (event) => { if (event.target.value !== "") pick(+event.target.value); });
pick(0);

/* The bound plan as a file. */
one("download").addEventListener("click", (event) => {
  const blob = new Blob([one("bound-plan").textContent], { type: "application/json" });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: event.target.dataset.name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});
show();
follow();
