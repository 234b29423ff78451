"use strict";
// Words on pointing or focus: one element for the page.
const tip = document.getElementById("tip");
function showTip(text, box) {
  tip.textContent = text;
  tip.hidden = false;
  const size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - size.width / 2), innerWidth - size.width - 8);
  const above = box.top - size.height - 8;
  tip.style.left = left + "px";
  tip.style.top = (above > 4 ? above : box.bottom + 8) + "px";
}
for (const [on, off] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  document.addEventListener(on, (event) => {
    const target = event.target.closest && event.target.closest("[data-tip]");
    if (target && target.dataset.tip) showTip(target.dataset.tip, target.getBoundingClientRect());
  });
  document.addEventListener(off, (event) => {
    if (event.target.closest && event.target.closest("[data-tip]")) tip.hidden = true;
  });
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// Arrow keys among buttons of which one is in the order of tabs.
function roving(buttons, step) {
  if (!buttons.length) return;
  buttons[0].tabIndex = 0;
  buttons.forEach((button, idx) => button.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: step, ArrowUp: -step, Home: -idx, End: buttons.length - 1 - idx }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const next = buttons[Math.min(buttons.length - 1, Math.max(0, idx + move))];
    buttons.forEach((other) => { other.tabIndex = other === next ? 0 : -1; });
    next.focus();
    if (step === 1) next.click();
  }));
}

const unpacked = (runs) => runs.flatMap(([value, count]) => Array(count).fill(value));
const counted = (number, what) => number.toLocaleString("en") + " " + what + (number === 1 ? "" : "s");

// Groups: which ranks share one with a rank, and which nodes and links they are on.
function drawMap(section, data) {
  const axes = new Map(data.axes.map((axis) => [axis.name, axis]));
  const nodes = [...section.querySelectorAll(".node")];
  const cells = nodes.map((node) => [...node.querySelectorAll(".cells button")]);
  const said = section.querySelector(".said");
  const cardOfNode = unpacked(data.cards), sizes = unpacked(data.sizes), starts = [0];
  sizes.forEach((size) => starts.push(starts[starts.length - 1] + size));
  const deviceOfRank = data.ranks ? data.ranks.reduce((all, rank, device) => { all[rank] = device; return all; }, []) : null;
  const nodeOfDevice = [];
  sizes.forEach((size, node) => { for (let k = 0; k < size; k++) nodeOfDevice.push(node); });
  let axis = null, rank = null;

  const place = (member) => {
    const device = deviceOfRank ? deviceOfRank[member] : member, node = nodeOfDevice[device];
    return [node, cardOfNode[node], device - starts[node]];
  };
  const group = (member) => member - Math.floor(member / axis.stride) % axis.size * axis.stride;
  const words = (numbers) => {
    const runs = [];
    for (const number of numbers) {
      const last = runs[runs.length - 1];
      if (last && last[1] === number - 1) last[1] = number; else runs.push([number, number]);
    }
    const texts = runs.slice(0, 4).map(([a, b]) => a === b ? a : a + "–" + b);
    return texts.join(", ") + (runs.length > 4 ? " and on" : "");
  };

  function paint() {
    section.querySelectorAll(".level").forEach((level) => level.classList.toggle("used", !!axis && +level.dataset.level === axis.level));
    nodes.forEach((node) => node.classList.remove("used"));
    cells.forEach((row) => row.forEach((cell, idx) => {
      const own = axis && group(+cell.dataset.rank), next = row[idx + 1];
      const joins = axis && next && (idx + 1) % 8 && group(+next.dataset.rank) === own;
      cell.className = "";
      cell.classList.toggle("join", !!joins);
      if (joins) next.dataset.joined = "1";
      if (cell.dataset.joined) { cell.classList.add("joined"); delete cell.dataset.joined; }
      if (axis && Math.floor(own / axis.stride / axis.size + own % axis.stride) % 2) cell.classList.add("odd");
    }));
    if (!axis) return;
    const one = counted(axis.groups, "group") + " of " + axis.size + " ranks, each " +
      (axis.nodes === 1 ? "within one node" : "on " + counted(axis.nodes, "node"));
    const over = " over " + data.levels[data.levels.length > axis.level ? axis.level : 0] + (axis.name === "pp" ? ", from neighbour to neighbour" : "");
    const cost = axis.exposed ? "; " + axis.exposed + " of a step (" + axis.share + ") exposed" : "; hidden behind compute";
    let text = axis.title + ": " + one + "," + over + cost + ".";
    if (rank !== null) {
      const first = group(rank), members = Array.from({ length: axis.size }, (_, k) => first + k * axis.stride);
      const on = new Set();
      for (const member of members) {
        const [node, card, position] = place(member);
        on.add(node);
        nodes[card].classList.add("used");
        cells[card][position].classList.add("peer");
      }
      const [node, card, position] = place(rank);
      cells[card][position].classList.add("here");
      text += " Rank " + rank + " on node " + node + ": its group is ranks " + words(members) + " on " +
        (on.size === 1 ? "node " : "nodes ") + words([...on].sort((a, b) => a - b)) + ".";
    }
    said.textContent = text;
  }
  const radios = [...section.querySelectorAll("[data-axis]")];
  radios.forEach((radio) => radio.addEventListener("click", () => {
    axis = axes.get(radio.dataset.axis);
    radios.forEach((other) => other.setAttribute("aria-checked", String(other === radio)));
    paint();
  }));
  roving(radios, 1);
  const all = cells.flat();
  let pinned = all.length ? +all[0].dataset.rank : null;
  rank = pinned;
  const choose = (cell) => { rank = cell ? +cell.dataset.rank : pinned; paint(); };
  all.forEach((cell) => {
    cell.addEventListener("click", () => { pinned = +cell.dataset.rank; choose(cell); });
    cell.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") choose(cell); });
    cell.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") choose(null); });
    cell.addEventListener("focus", () => choose(cell));
  });
  roving(all, 8);
  if (radios.length) radios[radios.length - 1].click();
}

// The pass under the pointer, or by arrow keys.
function drawPanel(svg, rows) {
  const cursor = svg.querySelector(".cursor");
  let row = 0, idx = -1;
  function show() {
    const piece = rows[row][idx];
    if (!piece) return;
    const [x, width, words, time] = piece, box = svg.getBoundingClientRect();
    for (const [name, value] of [["x", x], ["width", width], ["y", 10 * row]]) cursor.setAttribute(name, value);
    const scale = box.width / 10000, height = box.height / rows.length;
    showTip(words + ": " + time, { left: box.left + x * scale, width: width * scale, top: box.top + row * height, bottom: box.top + (row + 1) * height });
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 10000;
    row = Math.min(rows.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows.length)));
    idx = rows[row].findIndex(([left, width]) => left <= x && x < left + width);
    if (idx < 0) { tip.hidden = true; cursor.setAttribute("width", 0); } else show();
  });
  const leave = () => { tip.hidden = true; cursor.setAttribute("width", 0); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    row = Math.min(rows.length - 1, Math.max(0, row + move[0]));
    idx = Math.min(rows[row].length - 1, Math.max(0, idx + move[1]));
    show();
  });
}

function drawPlans(root = document) {
  for (const plan of root.querySelectorAll("article.plan:not([data-drawn])")) {
    plan.dataset.drawn = "1";
    const data = JSON.parse(plan.querySelector(".data").textContent);
    drawMap(plan.querySelector(".map"), data.map);
    plan.querySelectorAll(".panels svg").forEach((svg) => drawPanel(svg, data.panels[+svg.dataset.panel]));
    const copy = plan.querySelector(".copy");
    copy.addEventListener("click", async () => {
      const text = plan.querySelector(".command code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        copy.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(plan.querySelector(".command code"));
        copy.textContent = "selected";
      }
    });
  }
}
