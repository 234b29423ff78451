"use strict";
const form = document.getElementById("controls"), state = document.getElementById("state"), now = document.getElementById("now");
const kept = document.getElementById("kept"), failure = document.getElementById("error"), actions = state.querySelector(".actions");
const pageName = crypto.getRandomValues(new Uint32Array(2)).join("-");
const fixes = [...form.querySelectorAll("[data-fix]")];
const WAIT_MS = 350;
let timer = 0, asked = null, current = null, keptPlan = null;

// The controls as the planner is asked, and back. Factors are powers of two, so that their middle is the machine as it is.
const field = (name) => form.elements[name];
function read() {
  const controls = {};
  for (const name of ["model", "cluster", "engine", "precision"]) controls[name] = field(name).value;
  for (const name of ["global_batch_size", "seq_len", "headroom_percent", "price_per_hour"]) controls[name] = Number(field(name).value || 0);
  for (const name of ["bandwidth", "memory"]) controls[name] = 2 ** Number(field(name).value);
  const typed = field("fix").value.split(",").map((word) => word.trim()).filter(Boolean);
  controls.fix = [...fixes.filter((select) => select.value).map((select) => select.dataset.fix + "=" + select.value), ...typed].join(",");
  return controls;
}
function write(controls) {
  const words = (controls.fix || "").split(",").filter(Boolean);
  for (const select of fixes) {
    const word = words.find((each) => each.startsWith(select.dataset.fix + "="));
    const value = word ? word.split("=")[1] : "";
    select.value = [...select.options].some((option) => option.value === value) ? value : "";
    if (select.value) words.splice(words.indexOf(word), 1);
  }
  for (const [name, value] of Object.entries(controls)) {
    const input = field(name);
    if (!input) continue;
    if (name === "fix") input.value = words.join(",");
    else if (input.dataset.power) input.value = Math.log2(value);
    else input.value = name === "price_per_hour" && !value ? "" : value;
  }
  label();
}
function label() {
  for (const output of form.querySelectorAll("output")) {
    const input = field(output.htmlFor.value);
    const factor = 2 ** Number(input.value);
    const text = input.dataset.power ? (factor === 1 ? "as it is" : "× " + Number(factor.toPrecision(2))) : input.value + input.dataset.unit;
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
  }
}

function say(words, busy) {
  state.classList.toggle("busy", busy);
  state.querySelector(".words").textContent = words;
}
function fail(answer) {
  failure.replaceChildren();
  const add = (kind, text, name) => { const element = document.createElement(kind); element.textContent = text; if (name) element.className = name; failure.append(element); };
  add("b", answer.message);
  answer.details.forEach((line) => add("p", line));
  if (answer.help) add("p", "help: " + answer.help, "help");
  failure.hidden = false;
}

// Lines of JSON as they come.
async function lines(path, body, signal, take) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ page: pageName, ...body }), signal });
  if (!answer.ok) throw new Error(await answer.text());
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", end = false; !end;) {
    const { value, done } = await reader.read();
    if (signal.aborted) return;
    end = done;
    const parts = (rest + (value || "")).split("\n");
    rest = parts.pop();
    for (const part of parts) await take(JSON.parse(part));
  }
}

// One request at a time: a newer one ends the older one here and, as the connection closes, in the planner.
async function plan() {
  if (asked) asked.abort();
  const { signal } = asked = new AbortController(), controls = read();
  history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(controls)));
  now.classList.add("stale");
  actions.hidden = true;
  say("reading", true);
  try {
    let made = null;
    await lines("/plans", { controls }, signal, (line) => { made = take(line) || made; });
    if (made) await explain(made, signal);
  } catch (error) {
    if (signal.aborted) return;
    say("", false);
    fail({ message: "the studio does not answer: " + error.message, details: [], help: "start it again: meshwright studio" });
  }
}
function take(line) {
  if (line.kind === "progress") {
    const best = line.incumbent ? "best " + line.incumbent + ", bound " + line.bound + ", gap " + line.gap + " %" : "none that fits yet";
    say(line.evaluated + " layouts evaluated, " + best, true);
    return null;
  }
  if (line.kind === "error") {
    say("no plan for this", false);
    fail(line);
    return null;
  }
  failure.hidden = true;
  current = { html: line.html, figures: line.figures, id: line.id };
  now.innerHTML = line.html;
  now.classList.remove("stale");
  drawPlans(now);
  actions.hidden = false;
  document.getElementById("document").href = "/plans/" + line.id + "/plan.json";
  document.getElementById("report").href = "/plans/" + line.id + "/report.html";
  compare();
  return current;
}
async function explain(made, signal) {
  say("planned; explaining", true);
  await lines("/plans/" + made.id + "/explain", {}, signal, (line) => {
    if (line.kind === "progress") say("planned; explaining, " + line.done + " %", true);
    else if (line.kind === "error") say("planned; " + line.message, false);
    else {
      const read = document.createElement("template");
      read.innerHTML = line.html;
      for (const part of [".why", ".layouts"]) now.querySelector(part).replaceWith(read.content.querySelector(part));
      made.html = line.html;
      say("planned and explained", false);
    }
  });
}

function compare() {
  const section = document.getElementById("compared"), body = section.querySelector("tbody");
  section.hidden = kept.hidden = !keptPlan;
  document.getElementById("plans").classList.toggle("two", !!keptPlan);
  body.replaceChildren();
  if (!keptPlan || !current) return;
  keptPlan.figures.forEach((was) => {
    const is = current.figures.find((each) => each.name === was.name) || { text: "unknown", value: null }, row = body.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = was.name;
    row.append(head);
    let change = "";
    if (was.value && is.value) {
      const ratio = is.value / was.value - 1;
      change = Math.abs(ratio) < 5e-4 ? "same" : (ratio > 0 ? "+" : "−") + (100 * Math.abs(ratio)).toFixed(1) + " %";
    } else if (was.text === is.text) change = "same";
    for (const text of [was.text, is.text, change]) { const cell = row.insertCell(); cell.className = "num"; cell.textContent = text; }
    if (was.value === null) row.className = "layout";
    if (was.value && is.value && Math.abs(is.value / was.value - 1) >= 5e-4)
      row.cells[(is.value < was.value) === was.less ? 2 : 1].classList.add("better");
  });
}

document.getElementById("keep").addEventListener("click", () => {
  if (!current) return;
  keptPlan = current;
  kept.innerHTML = current.html;
  drawPlans(kept);
  compare();
});
document.getElementById("drop").addEventListener("click", () => { keptPlan = null; kept.replaceChildren(); compare(); });
document.getElementById("reset").addEventListener("click", () => {
  field("bandwidth").value = field("memory").value = 0;
  field("price_per_hour").value = "";
  label();
  plan();
});
form.addEventListener("input", () => {
  label();
  clearTimeout(timer);
  timer = setTimeout(plan, WAIT_MS);
});
form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); plan(); });

let start = JSON.parse(document.getElementById("start").textContent);
try {
  if (location.hash.length > 1) start = { ...start, ...JSON.parse(decodeURIComponent(location.hash.slice(1))) };
} catch { /* not ours */ }
write(start);
plan();
