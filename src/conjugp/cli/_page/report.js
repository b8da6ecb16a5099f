"use strict";
(() => {
  const root = document.documentElement;
  const toggle = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
  system.addEventListener("change", label);
  label();

  const page = 25;
  const table = document.getElementById("browse");
  const body = table.tBodies[0];
  const filter = document.getElementById("filter");
  const wrong = document.getElementById("wrong");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const rows = Array.from(body.rows);
  // The whole text of every cell, also of one that is cut.
  const text = (cell) => (cell.title || cell.textContent).toLowerCase();
  const words = new Map(rows.map((row) => [row, Array.from(row.cells, text)]));
  let shown = page;

  const draw = () => {
    const wanted = filter.value.trim().toLowerCase();
    let found = 0;
    for (const row of body.rows) {
      const named = words.get(row).some((cell) => cell.includes(wanted));
      const fits = named && (!wrong.checked || row.classList.contains("wrong"));
      if (fits) found += 1;
      row.hidden = !fits || found > shown;
    }
    count.textContent = `${Math.min(found, shown)} of ${found} shown`;
    more.hidden = found <= shown;
  };
  const again = () => { shown = page; draw(); };

  const value = (row, i, number) => {
    const cell = row.cells[i];
    const text = cell.dataset.v ?? cell.textContent;
    return number ? parseFloat(text) : text;
  };
  const compare = (a, b, number) => {
    if (!number) return a.localeCompare(b, "en", { numeric: true });
    if (Number.isNaN(a)) return Number.isNaN(b) ? 0 : 1;
    return Number.isNaN(b) ? -1 : a - b;
  };
  Array.from(table.tHead.rows[0].cells).forEach((head, i) => {
    head.firstElementChild.addEventListener("click", () => {
      const number = head.dataset.kind === "number";
      const order = head.getAttribute("aria-sort");
      const down = order ? order === "ascending" : number;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      const sorted = Array.from(body.rows)
        .map((row) => [value(row, i, number), row])
        .sort((x, y) => sign * compare(x[0], y[0], number));
      body.append(...sorted.map((pair) => pair[1]));
      again();
    });
  });
  filter.addEventListener("input", again);
  wrong.addEventListener("change", again);
  more.addEventListener("click", () => { shown += page; draw(); });
  draw();
})();
