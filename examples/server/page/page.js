"use strict";
// Draws the messages of `/events`. The server decides everything; between two messages only the time goes on.

const $ = (selector, within = document) => within.querySelector(selector);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
/** The part of a lane to the right of "now", where a boundary comes closer. */
const FUTURE = 0.14;
const CALM_STEP = 1000;
const FLASH = 700;

const LANES = {
  "hello": ["Sliding window", "what this server uses"],
  "hello-fixed": ["Fixed window", "the same requests; all places are free again at each dashed line"],
  "hello-counter": ["Two-window counter", "counts this window, plus the part of the one before that still overlaps, as if spread evenly"],
  "login": ["Sliding window", "of a minute"],
  "api-burst": ["Burst", "one limit of two"],
  "api-steady": ["Steady", "a request needs both"],
};
const GROUPS = [
  { lanes: ["hello", "hello-fixed", "hello-counter"], route: "GET /hello", mode: "open", without: "open: lets all through, uncounted" },
  { lanes: ["login"], route: "POST /login", mode: "closed", without: "closed: 503 for all" },
  { lanes: ["api-burst", "api-steady"], route: "GET /api/…", mode: "local", without: "local: half of each limit" },
];

let lanes = [];      // the lanes, in the order of the server
let client = 1;
let clients = 3;     // the page uses the first three
let offset = null;   // the store's clock minus the page's
let store = {};
let heard = 0;       // when the last message came
let isAway = false;
let stop = () => {}; // ends the current source of messages

const now = () => performance.now() + (offset ?? 0);
const seconds = (millis) => {
  if (millis >= 3_600_000) return `${+(millis / 3_600_000).toFixed(1)} h`;
  if (millis > 120_000) return `${+(millis / 60_000).toFixed(1)} min`;
  return `${+(millis / 1000).toFixed(2)} s`;
};
const text = (element, value) => { if (element.textContent !== value) element.textContent = value; };
const say = (words) => text($("#said"), words);

// --- Messages -------------------------------------------------------------------------------------------------------

function connect() {
  stop();
  const wanted = client;
  if (!window.EventSource) return poll(wanted);
  const source = new EventSource(`events?client=${wanted}`);
  stop = () => source.close();
  source.onmessage = (event) => { if (wanted === client) receive(JSON.parse(event.data)); };
  // It would try again by itself, but not after every kind of failure.
  source.onerror = () => { source.close(); away(); };
}

function poll(wanted) {
  notice("This browser has no server-sent events, so the page asks once a second.");
  const ask = async () => {
    try { const reply = await fetch(`state?client=${wanted}`); if (wanted === client) receive(await reply.json()); } catch { away(); }
  };
  const timer = setInterval(ask, 1000);
  stop = () => clearInterval(timer);
  ask();
}

function notice(words) {
  $("#connection").hidden = !words;
  text($("#connection"), words);
}

function away() {
  if (!isAway) {
    isAway = true;
    document.body.classList.add("away");
    notice("The server does not answer. The page goes on by itself when it is back.");
    say("The server does not answer.");
    allow(false);
    for (const badge of document.querySelectorAll(".badge")) {
      badge.dataset.mode = "away";
      text(badge, "no connection");
    }
    lanes.forEach((lane) => { lane.figures = null; });
    showFigures();
  }
  if (window.EventSource) { stop(); clearTimeout(away.timer); away.timer = setTimeout(connect, 500); }
}

function receive(message) {
  heard = performance.now();
  const sample = message.now - heard;
  // A message is late, never early: the largest difference is the best, unless a clock was set.
  offset = offset === null || Math.abs(sample - offset) > 2000 ? sample : Math.max(sample, offset - 0.5);
  if (isAway) {
    isAway = false;
    document.body.classList.remove("away");
    allow(true);
    notice(window.EventSource ? "" : "This browser has no server-sent events, so the page asks once a second.");
    say("The server is back.");
  }
  if (message.setup) setUp(message.setup);
  if (message.all) lanes.forEach((lane) => { lane.dots = []; lane.rows = []; });
  for (const [number, at, units, kind] of message.dots) add(lanes[number], { at, units, kind }, message.now);
  lanes.forEach((lane, number) => {
    lane.figures = message.lanes && message.lanes[number];
    lane.freeAt = lane.figures ? message.now + lane.figures[2] : null;
    lane.dots = lane.dots.filter((dot) => dot.at > message.now - lane.window - 60_000);
    if (lane.dots.length > 5000) lane.dots.splice(0, lane.dots.length - 5000);
    lane.most = mostInAnyWindow(lane);
  });
  if (store.decides !== undefined && store.decides !== message.store.decides) {
    say(message.store.decides ? "The store decides again." : "The store does not decide. Each route shows its failure mode.");
  }
  store = message.store;
  showStore();
  showFigures();
}

function setUp(setup) {
  text($("#store-name"), `The store: ${setup.store}`);
  const isRedis = setup.store.startsWith("Redis");
  $("#stop").dataset.what = isRedis ? "Redis" : "the store";
  $("#stop").title = isRedis ? "Cuts this server off from Redis" : "Makes the store of this server fail";
  $("#remembered").hidden = !isRedis;
  const same = lanes.length === setup.lanes.length && setup.lanes.every((lane, n) => lanes[n].name === lane.name && lanes[n].window === lane.window && lanes[n].units === lane.units);
  if (same) return;
  lanes = setup.lanes.map((lane) => ({ ...lane, dots: [], rows: [], most: 0 }));
  $("#groups").replaceChildren(...GROUPS.map(group));
  document.querySelectorAll(".window").forEach((place) => text(place, seconds(lanes[0].window)));
  document.querySelectorAll(".units").forEach((place) => text(place, String(lanes[0].units)));
}

function add(lane, dot, time) {
  const isMark = dot.kind === "refused" || dot.kind === "unavailable";
  if (isMark) {
    dot.flashAt = time - dot.at < 1500 ? performance.now() : -Infinity;
  } else {
    // The lowest row where it touches no other dot.
    const touching = (lane.window * (1 + FUTURE) / Math.max(lane.width || 600, 200)) * 2.3 * radius(lane);
    let row = lane.rows.findIndex((last) => dot.at - last >= touching);
    if (row < 0) row = lane.rows.length;
    dot.row = row;
    if (row < rowsOf(lane)) {
      lane.rows[row] = dot.at;
    } else {
      // It is a part of a number above the dots. Numbers are wider than dots.
      const last = lane.dots.findLast((other) => other.crowd !== undefined);
      dot.crowd = last && Math.abs(dot.at - last.crowd) < touching * 34 / (2.3 * radius(lane)) ? last.crowd : dot.at;
    }
  }
  lane.dots.push(dot);
}

const isCounted = (dot) => dot.kind === "admitted" || dot.kind === "elsewhere";

function mostInAnyWindow(lane) {
  const counted = lane.dots.filter(isCounted).sort((a, b) => a.at - b.at);
  let most = 0, sum = 0, first = 0;
  for (const dot of counted) {
    sum += dot.units;
    while (counted[first].at <= dot.at - lane.window) sum -= counted[first++].units;
    most = Math.max(most, sum);
  }
  return most;
}

// --- Figures --------------------------------------------------------------------------------------------------------

function group({ lanes: names, route, mode }) {
  const section = document.createElement("section");
  section.className = "group";
  section.dataset.mode = mode;
  const first = lanes.find((lane) => lane.name === names[0]);
  const rule = names.length === 2 ? "two limits, decided together; by API key" : `${first.units} in any ${seconds(first.window)}; by client address`;
  section.innerHTML = `<div class="head"><h2></h2><p></p><span class="badge" data-mode="deciding">deciding</span></div>`;
  text($("h2", section), route);
  text($("p", section), rule);
  for (const name of names) {
    const lane = lanes.find((lane) => lane.name === name);
    const [title, about] = LANES[name] ?? [name, ""];
    lane.element = document.createElement("article");
    lane.element.className = "lane";
    lane.element.dataset.lane = name;
    lane.element.innerHTML = `<div><h3></h3><p></p><p class="partial" hidden>Requests of other servers are not drawn here.</p></div>
      <div class="plot"><canvas role="img"></canvas><div class="axis" aria-hidden="true"></div></div>
      <dl class="figures">
        <div><dt>used</dt><dd data-figure="used">–</dd></div><div><dt>left</dt><dd data-figure="left">–</dd></div>
        <div><dt>next place</dt><dd data-figure="next">–</dd></div><div><dt></dt><dd data-figure="most">0</dd></div>
      </dl>`;
    text($("h3", lane.element), title);
    text($("p", lane.element), names.length === 2 ? `${lane.units} in any ${seconds(lane.window)}; ${about}` : about);
    text($("div:last-child > dt", $(".figures", lane.element)), `most so far in any ${seconds(lane.window)}`);
    const axis = [[1, `${seconds(lane.window)} ago`], [0.5, seconds(lane.window / 2)], [0, "now"]];
    $(".axis", lane.element).replaceChildren(...axis.map(([age, words]) => {
      const mark = document.createElement("span");
      mark.textContent = words;
      mark.style.left = `${100 * (1 - age) / (1 + FUTURE)}%`;
      return mark;
    }));
    lane.canvas = $("canvas", lane.element);
    section.append(lane.element);
  }
  return section;
}

function showFigures() {
  for (const lane of lanes) {
    const figure = (name) => $(`[data-figure=${name}]`, lane.element);
    const [used, left] = lane.figures ?? [null, null];
    const wait = Math.max(0, lane.freeAt - now());
    const next = left === null ? "–" : left > 0 ? "free now" : wait < 60_000 ? `in ${(Math.ceil(Math.max(wait, 1) / 100) / 10).toFixed(1)} s` : `in ${seconds(wait)}`;
    text(figure("used"), used === null ? "unknown" : `${used} of ${lane.units}`);
    text(figure("left"), left === null ? "–" : String(left));
    text(figure("next"), next);
    const isPartial = lane.name.endsWith("-counter") && lanes.some((other) => lane.name.startsWith(other.name) && other.dots.some((dot) => dot.kind === "elsewhere"));
    text(figure("most"), isPartial ? "–" : String(lane.most));
    figure("most").classList.toggle("over", lane.most > lane.units && !isPartial);
    $(".partial", lane.element).hidden = !isPartial;
    const shown = lane.dots.filter((dot) => isCounted(dot) && dot.at > now() - lane.window).reduce((sum, dot) => sum + dot.units, 0);
    lane.element.dataset.dots = shown;
    // For readers of the screen, no more often than they can read.
    if (performance.now() - (lane.labelled ?? -Infinity) > 1000) {
      lane.labelled = performance.now();
      lane.canvas.setAttribute("aria-label", `${shown} admitted in the last ${seconds(lane.window)}; ${used ?? "unknown"} of ${lane.units} used`);
    }
  }
}

function showStore() {
  for (const [number, { mode, without }] of GROUPS.entries()) {
    const badge = $(".badge", $("#groups").children[number]);
    badge.dataset.mode = store.decides ? "deciding" : mode;
    text(badge, store.decides ? "deciding" : without + (store.breaker ? " · breaker open" : ""));
  }
  const state = $("#store-state");
  state.dataset.mode = store.decides ? "deciding" : "stopped";
  text(state, store.decides ? "deciding" : store.stopped ? "stopped by this page" : "does not answer");
  text($("#stop"), `${store.stopped ? "Start" : "Stop"} ${$("#stop").dataset.what}`);
  $("#stop").setAttribute("aria-pressed", String(store.stopped));
  const figure = (name, value) => text($(`#store [data-figure=${name}]`), value);
  figure("requests", String(store.requests));
  figure("calls", String(store.calls));
  figure("time", store.calls ? store.micros < 1000 ? `${store.micros} µs` : `${(store.micros / 1000).toFixed(1)} ms` : "–");
  figure("breaker", store.breaker ? "open" : "closed");
}

// --- Drawing --------------------------------------------------------------------------------------------------------

const HEIGHT = 84;
/** The height of a full column. Above it is a line for the number of dots that do not fit. */
const COLUMN = 56;
const rowsOf = (lane) => Math.min(Math.max(lane.units, 5), 8);
const radius = (lane) => COLUMN / rowsOf(lane) / 2 - 0.5;
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "band", "accent", "elsewhere", "refused", "local", "uncounted", "card"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  document.querySelectorAll("#legend canvas").forEach((canvas) => shape(fit(canvas, 16, 16), canvas.dataset.kind, 8, 8, 5));
}

/** The context of a canvas of this size, in the pixels of the screen. */
function fit(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Each kind has a shape of its own, since some people see no difference between the colours. */
function shape(context, kind, x, y, r) {
  context.beginPath();
  context.lineWidth = 1.8;
  context.strokeStyle = context.fillStyle = colours[{ admitted: "accent", forgotten: "accent", part: "accent", "forgotten-elsewhere": "elsewhere", unavailable: "refused" }[kind] ?? kind];
  if (kind === "admitted") { context.arc(x, y, r, 0, 7); context.fill(); }
  if (kind === "part") { context.globalAlpha = 0.4; context.arc(x, y, r, 0, 7); context.fill(); context.globalAlpha = 1; }
  if (kind === "forgotten") { context.arc(x, y, r - 0.9, 0, 7); context.stroke(); }
  if (kind === "elsewhere") { diamond(context, x, y, r + 1); context.fill(); }
  if (kind === "forgotten-elsewhere") { diamond(context, x, y, r); context.stroke(); }
  if (kind === "uncounted") { context.setLineDash([2, 2]); context.arc(x, y, r - 0.9, 0, 7); context.stroke(); context.setLineDash([]); }
  if (kind === "local") { context.moveTo(x, y - r); context.lineTo(x + r, y + r * 0.8); context.lineTo(x - r, y + r * 0.8); context.fill(); }
  if (kind === "refused") { context.moveTo(x - r * 0.7, y - r * 0.7); context.lineTo(x + r * 0.7, y + r * 0.7); context.moveTo(x + r * 0.7, y - r * 0.7); context.lineTo(x - r * 0.7, y + r * 0.7); context.stroke(); }
  if (kind === "unavailable") { context.rect(x - r * 0.7, y - r * 0.7, r * 1.4, r * 1.4); context.stroke(); context.moveTo(x - r * 0.7, y + r * 0.7); context.lineTo(x + r * 0.7, y - r * 0.7); context.stroke(); }
}

function diamond(context, x, y, r) {
  context.moveTo(x, y - r);
  context.lineTo(x + r, y);
  context.lineTo(x, y + r);
  context.lineTo(x - r, y);
  context.closePath();
}

function draw(lane) {
  const width = lane.canvas.clientWidth;
  if (!width) return;
  lane.width = width;
  const context = fit(lane.canvas, width, HEIGHT);
  const time = calm.matches ? Math.floor(now() / CALM_STEP) * CALM_STEP : now();
  const edge = width / (1 + FUTURE);
  // A dot that is newer than the last step waits at "now".
  const x = (at) => edge + (Math.min(at, time) - time) * edge / lane.window;
  const isFixed = lane.name.endsWith("-fixed"), isCounter = lane.name.endsWith("-counter");
  const boundary = Math.floor(time / lane.window) * lane.window;
  const base = HEIGHT - 17;

  // The window in which dots count.
  context.fillStyle = colours.band;
  const begin = isFixed ? x(boundary) : 0;
  context.fillRect(begin, 0, edge - begin, base + 6);
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, base + 6.5);
  context.lineTo(width, base + 6.5);
  context.stroke();
  if (isFixed || isCounter) {
    context.setLineDash([4, 4]);
    context.strokeStyle = colours.soft;
    for (const line of [boundary, boundary + lane.window]) {
      const at = edge + (line - time) * edge / lane.window;
      context.beginPath();
      context.moveTo(at, 0);
      context.lineTo(at, HEIGHT);
      context.stroke();
    }
    context.setLineDash([]);
  }

  const r = radius(lane), crowds = new Map();
  for (const dot of lane.dots) {
    if (dot.at <= time - lane.window) continue;
    if (dot.row === undefined) {
      const since = performance.now() - dot.flashAt;
      const flash = !calm.matches && since < FLASH ? 1 - since / FLASH : 0;
      context.globalAlpha = 0.6 + 0.4 * flash;
      shape(context, dot.kind, x(dot.at), HEIGHT - 5, 4.5 + 5 * flash);
      context.globalAlpha = 1;
      continue;
    }
    if (dot.crowd !== undefined) {
      crowds.set(dot.crowd, (crowds.get(dot.crowd) ?? 0) + 1);
      continue;
    }
    const counts = !isFixed || dot.at >= boundary;
    // A counter weights the window before by the part that is still in the sliding window.
    if (isCounter && dot.at < boundary) context.globalAlpha = 0.2 + 0.8 * (1 - (time - boundary) / lane.window);
    const kind = counts ? dot.kind : { admitted: "forgotten", elsewhere: "forgotten-elsewhere" }[dot.kind] ?? dot.kind;
    shape(context, kind, x(dot.at), base - r - dot.row * (2 * r + 1), dot.units > 1 ? r * 1.6 : r);
    context.globalAlpha = 1;
  }
  context.font = `600 10px ${getComputedStyle(lane.canvas).fontFamily}`;
  context.fillStyle = colours.ink;
  for (const [at, count] of crowds) context.fillText(`+${count}`, x(at) - r, base - COLUMN - 2);
  lane.element.dataset.more = [...crowds.values()].join(" ");

  // Now.
  const refusedNow = !calm.matches && lane.dots.some((dot) => dot.row === undefined && performance.now() - dot.flashAt < 250);
  context.strokeStyle = refusedNow ? colours.refused : colours.ink;
  context.lineWidth = refusedNow ? 4 : 1.5;
  context.beginPath();
  context.moveTo(edge, 0);
  context.lineTo(edge, HEIGHT);
  context.stroke();
}

let drawnAt = -Infinity, figuresAt = -Infinity;
function frame(time) {
  requestAnimationFrame(frame);
  if (calm.matches && time - drawnAt < CALM_STEP) return;
  if (offset === null) return;
  drawnAt = time;
  lanes.forEach(draw);
  document.body.dataset.drawings = Number(document.body.dataset.drawings ?? 0) + 1;
  if (time - figuresAt > 100 && !isAway) { figuresAt = time; showFigures(); }
  if (!isAway && performance.now() - heard > 3000 && heard) away();
}

// --- Deeds ----------------------------------------------------------------------------------------------------------

// Buttons that are really disabled would lose the focus of the keyboard.
function allow(isAllowed) {
  document.querySelectorAll("#controls button").forEach((button) => { button.ariaDisabled = isAllowed ? null : "true"; });
}
$("#controls").addEventListener("click", (event) => { if (isAway) event.stopPropagation(); }, true);

/** Other web sites cannot set this header. */
const post = (path) => fetch(path, { method: "POST", headers: { "x-page": "1" } });

async function send(count, path = $("#path").value) {
  try {
    const reply = await post(`send?client=${client}&path=${path}&count=${count}`);
    if (reply.ok) return await reply.json();
    say(await reply.text());
    return null;
  } catch { away(); return null; }
}

function result(statuses) {
  if (!statuses) return;
  const words = {
    "_200": "admitted", "_uncounted": "let through uncounted", "_local": "admitted by this process alone", "_429": "refused",
    "_503": "rejected with 503",
  };
  const order = Object.keys(words);
  const counts = Object.entries(statuses).sort(([one], [two]) => order.indexOf("_" + one) - order.indexOf("_" + two));
  say(counts.map(([status, count]) => `${count} ${words["_" + status] ?? `rejected with ${status}`}`).join(", ") + ".");
}

// Without the old words, the same words again would be no news to a screen reader.
const press = async (count) => { say(""); result(await send(count)); };
$("#one").onclick = () => press(1);
$("#burst").onclick = () => press(20);

$("#another").onclick = () => {
  client = client % clients + 1;
  text($("#client"), `client ${client}`);
  say(`You are client ${client}: 127.0.0.${client}, with windows of its own.`);
  lanes.forEach((lane) => { lane.dots = []; lane.rows = []; });
  connect();
};

let owed = 0, isSending = false;
$("#rate").oninput = () => text($("#rate-text"), $("#rate").value === "0" ? "off" : `${$("#rate").value} a second`);
setInterval(async () => {
  owed = Math.min(owed + Number($("#rate").value) / 20, 100);
  if (isSending || owed < 1 || isAway) return;
  const count = Math.floor(owed);
  owed -= count;
  isSending = true;
  await send(count);
  isSending = false;
}, 50);

const sleepUntil = (time, isOver = () => false) => new Promise((resolve) => {
  const look = () => (now() >= time || isOver() ? resolve() : setTimeout(look, Math.min(100, Math.max(1, time - now()))));
  look();
});

$("#across").onclick = async () => {
  const button = $("#across"), [ours, fixed] = lanes;
  if (button.ariaDisabled === "true" || isAway) return;
  if (!store.decides) return say("The store does not decide. Start it first.");
  if (ours.units > 500) return say("The limit is too large for this burst.");
  $("#path").value = "/hello";
  $("#rate").value = 0;
  $("#rate").oninput();
  const before = Math.min(600, ours.window * 0.06), after = before / 4;
  // Both windows have to be empty: the fixed one until its boundary, ours until its newest dot has left.
  const next = (Math.floor(now() / fixed.window) + 1) * fixed.window;
  let boundary = next;
  const isUsed = () => fixed.dots.some((dot) => isCounted(dot) && dot.at >= boundary - fixed.window);
  const last = Math.max(0, ...ours.dots.filter(isCounted).map((dot) => dot.at)) + ours.window;
  while (isUsed() || boundary - before < Math.max(now() + 300, last)) boundary += fixed.window;
  if (boundary - now() > 120_000) {
    return say(`${boundary > next ? "This window is used. " : ""}The next burst across a boundary is possible in ${seconds(boundary - now())}.`);
  }

  // A disabled button would lose the focus of the keyboard.
  button.ariaDisabled = "true";
  const count = () => text(button, `Burst in ${Math.max(0, (boundary - before - now()) / 1000).toFixed(1)} s`);
  const label = setInterval(count, 100);
  count();
  say(`To /hello: ${ours.units} requests just before the boundary, and ${ours.units} just after it.`);
  const wanted = client;
  const isOver = () => isAway || wanted !== client;
  for (const time of [boundary - before, boundary + after]) {
    await sleepUntil(time, isOver);
    if (!isOver()) await send(ours.units, "/hello");
  }
  clearInterval(label);
  text(button, "Burst across the boundary");
  button.ariaDisabled = isAway ? "true" : null;
  await sleepUntil(now() + 300);
  if (!isOver()) say(`In ${seconds(ours.window)}, the fixed window admitted ${fixed.most}, the sliding one ${ours.most}. The limit is ${ours.units}.`);
};

$("#stop").onclick = async () => {
  const stopped = !store.stopped;
  try {
    const reply = await post(`store?stopped=${stopped}`);
    if (!reply.ok) say(await reply.text());
  } catch { away(); }
};

document.querySelectorAll(".origin").forEach((place) => text(place, location.origin));
readColours();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);
connect();
requestAnimationFrame(frame);
