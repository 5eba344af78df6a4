"use strict";
// The page of a kvasir server. It reads GET /live, server-sent events: the first one has an hour of points, each later one the newest two.
// Times are on the server's monotonic clock (now_s); only what people read is turned into times of day.

// ---- texts

const $ = id => document.getElementById(id);
function el(name, text, cls) {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
}
function svg(name, attrs, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  e.append(...children);
  return e;
}
function put(id, text) { const e = typeof id === "string" ? $(id) : id; if (e.textContent !== text) e.textContent = text; }
const is = v => v !== null && v !== undefined && isFinite(v);
const count = n => Math.round(n).toLocaleString("en");
const many = (n, what) => count(n) + " " + what + (n === 1 ? "" : "s");
const share = (part, of) => of > 0 ? (100 * Math.min(part, of) / of).toFixed(1) + " %" : "–";
const percent = v => is(v) ? (100 * v).toFixed(1) + " %" : "–";
function digits(v) { return v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2); }
function size(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  for (; Math.abs(n) >= 1024 && i < units.length - 1; i++) n /= 1024;
  return (i ? digits(n).replace(/\.0+$/, "") : Math.round(n)) + " " + units[i];
}
const perSecond = v => !is(v) ? "–" : v >= 1e9 ? digits(v / 1e9) + " GB/s" : v >= 1e6 ? digits(v / 1e6) + " MB/s" : v >= 1e3 ? digits(v / 1e3) + " kB/s" : Math.round(v) + " B/s";
const took = v => !is(v) ? "–" : v >= 1 ? digits(v) + " s" : v >= 1e-3 ? digits(v * 1e3) + " ms" : digits(v * 1e6) + " µs";
function span(s) {
  s = Math.round(s);
  if (s < 120) return s + " s";
  if (s < 7200) return Math.floor(s / 60) + " min";
  return s < 172800 ? Math.floor(s / 3600) + " h" : Math.floor(s / 86400) + " d";
}
function long(s) { // of what was saved
  if (s < 120) return digits(s) + " s";
  if (s < 7200) return digits(s / 60) + " min";
  return s < 172800 ? digits(s / 3600) + " h" : digits(s / 86400) + " d";
}
const clock = at => new Date(at).toLocaleTimeString("en-GB");
function short(version) { const m = version.match(/-([0-9a-f]{8})[0-9a-f]*(\+dirty)?$/); return m ? m[1] : version; }
const salted = (model, salt) => (model || "no name") + (salt ? ", " + salt : "");

// ---- tables

// table shows rows of cells: texts, or nodes with a text of their own as sig. heads begin with # for numbers, ~ for names, > for sentences, = for
// bars, ^ for small lines. Rows that are as they were stay, with the focus and what is selected.
function table(id, heads, rows, none) {
  const box = $(id), sig = JSON.stringify([heads, rows, none], (k, v) => v instanceof Node ? v.sig || v.textContent : v);
  if (box.sig === sig) return;
  box.sig = sig;
  const at = document.activeElement, had = box.contains(at) ? at.dataset.key : undefined, left = box.scrollLeft, top = box.scrollTop;
  if (!rows.length) { box.replaceChildren(el("p", none, "soft")); return; }
  const kinds = { "#": "n", "~": "name", ">": "say", "=": "wide", "^": "small" };
  const t = el("table"), h = t.createTHead().insertRow(), b = t.createTBody();
  for (const head of heads) { const th = el("th", head.replace(/^[#~>=^]/, ""), head[0] === "#" ? "n" : head[0] === "=" ? "wide" : ""); th.scope = "col"; h.append(th); }
  for (const row of rows) {
    const tr = b.insertRow();
    row.forEach((cell, i) => { const td = el("td", undefined, kinds[heads[i][0]] || ""); td.append(cell); tr.append(td); });
  }
  box.replaceChildren(t);
  box.scrollLeft = left;
  box.scrollTop = top;
  if (had !== undefined) { const again = [...box.querySelectorAll("[data-key]")].find(e => e.dataset.key === had); if (again) again.focus({ preventScroll: true }); }
}
function bar(part, of, cls, label) {
  const w = of > 0 ? Math.max(0, Math.min(100, 100 * part / of)) : 0;
  const e = svg("svg", { class: "bar " + cls, viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label }, svg("rect", { class: "ground", width: 100, height: 10 }), svg("rect", { width: w, height: 10, fill: "currentColor" }));
  e.sig = label + w.toFixed(1) + cls;
  return e;
}
function button(text, key, does, cls) {
  const b = el("button", text, cls || "small");
  b.type = "button";
  b.dataset.key = b.sig = key;
  b.onclick = does;
  return b;
}
// link is a request's id that leads to its steps, above what else is known of it.
function link(id, of) {
  const box = el("div"), a = el(id ? "a" : "span", id || "–");
  if (id) { a.href = "#request=" + encodeURIComponent(id); a.dataset.key = id; }
  box.append(a);
  if (of) box.append(el("div", of, "soft"));
  return box;
}

// ---- charts

// step is the least of 1, 2, 5 times a power of ten that makes at most most steps of a span.
function step(span, most) {
  const unit = Math.pow(10, Math.floor(Math.log10(span / most)));
  for (const m of [1, 2, 5, 10]) if (span / (m * unit) <= most + 1e-9) return m * unit;
}
function linear(top) {
  const d = step(top, 5), n = Math.max(1, Math.ceil(top / d - 1e-9)), ticks = [];
  for (let i = 0; i <= n; i++) ticks.push(+(i * d).toPrecision(12));
  return { ticks, at: v => v / (n * d) };
}
function logarithmic(low, high) {
  let from = Math.pow(10, Math.floor(Math.log10(low))), to = Math.pow(10, Math.ceil(Math.log10(high)));
  if (to <= from) to = from * 10;
  const mantissas = to / from > 101 ? [1] : [1, 2, 5], ticks = [];
  for (let u = from; u <= to * 1.001; u *= 10) for (const m of mantissas) if (m * u <= to * 1.001) ticks.push(+(m * u).toPrecision(12));
  while (ticks.length > 2 && ticks[1] <= low) ticks.shift();
  while (ticks.length > 2 && ticks[ticks.length - 2] >= high) ticks.pop();
  from = ticks[0]; to = ticks[ticks.length - 1];
  return { ticks, at: v => Math.log(v / from) / Math.log(to / from) };
}
const charts = {}; // by section: how it was drawn, for the cursor
const sizes = {}; // of the charts, pixels: read together, since each look after a change makes the browser lay the page out
function measure() { for (const b of document.querySelectorAll(".chart svg")) sizes[b.parentElement.id] = [Math.max(200, b.clientWidth), Math.max(100, b.clientHeight)]; }
const M = { left: 62, right: 14, top: 8, bottom: 24 };

// draw draws lines over x. c has xs, lines of { name, cls, values, area, dash, marks }, the scale y, texts of ticks, and x: { at(v) in 0 to 1, ticks of
// [value, text] }. label is for those who do not see it.
function draw(id, c) {
  const box = $(id).querySelector("svg"), [w, h] = sizes[id], iw = w - M.left - M.right, ih = h - M.top - M.bottom;
  const X = v => M.left + iw * c.x.at(v), Y = v => M.top + ih * (1 - Math.max(0, Math.min(1, c.y.at(v)))), parts = [];
  for (const t of c.y.ticks) parts.push(svg("line", { class: "grid", x1: M.left, x2: w - M.right, y1: Y(t), y2: Y(t) }), text(M.left - 8, Y(t) + 4, c.tick(t), "end"));
  let free = Infinity; // texts are written from the right to the left, where there is room
  for (const [v, t] of [...c.x.ticks].reverse()) {
    const half = 3.6 * t.length, at = Math.min(X(v), w - half - 1);
    parts.push(svg("line", { class: "grid", x1: X(v), x2: X(v), y1: M.top + ih, y2: M.top + ih + 4 }));
    if (at + half + 8 > free) continue;
    parts.push(text(at, h - 4, t, "middle"));
    free = at - half;
  }
  for (const l of c.lines) parts.push(lineOf(l, c.xs, X, Y, M.top + ih, c.gap));
  for (const m of c.notes || []) parts.push(svg("g", { class: m.cls }, m.x !== undefined ? svg("line", { class: "line dash", x1: X(m.x), x2: X(m.x), y1: M.top, y2: M.top + ih }) : svg("line", { class: "line dash", x1: M.left, x2: w - M.right, y1: Y(m.y), y2: Y(m.y) })));
  if (!c.lines.some(l => l.values.some(is))) parts.push(text(M.left + iw / 2, M.top + ih / 2, c.none, "middle"));
  const cursor = svg("g", {});
  parts.push(cursor);
  box.setAttribute("viewBox", "0 0 " + w + " " + h);
  box.setAttribute("aria-label", c.label);
  box.replaceChildren(...parts);
  const was = charts[id];
  charts[id] = { c, X, Y, ih, cursor, at: was && was.held ? was.at : null, held: was && was.held };
  read(id);
}
// lineOf draws a line over xs with the area down to bottom. It ends where a value is not known, and with gap where two points are further apart.
function lineOf(l, xs, X, Y, bottom, gap) {
  let path = "", area = "", from = null, last = null;
  const g = svg("g", { class: l.cls });
  const shut = () => { if (from !== null && l.area) area += "L" + last[0] + " " + bottom + "L" + from[0] + " " + bottom + "Z"; from = null; };
  l.values.forEach((v, i) => {
    if (!is(v) || (gap && i && xs[i] - xs[i - 1] > gap)) shut();
    if (!is(v)) return;
    const p = [X(xs[i]).toFixed(1), Y(v).toFixed(1)];
    path += (from ? "L" : "M") + p[0] + " " + p[1];
    if (l.area) area += (from ? "L" : "M") + p[0] + " " + p[1];
    const alone = !from && !(i + 1 < l.values.length && is(l.values[i + 1]));
    if (l.marks || alone) g.append(svg("circle", { class: "dot", cx: p[0], cy: p[1], r: l.marks ? 3 : 1.6 }));
    from = from || p;
    last = p;
  });
  shut();
  if (area) g.prepend(svg("path", { class: "area", d: area }));
  if (path) g.append(svg("path", { class: "line" + (l.dash ? " dash" : ""), d: path }));
  return g;
}
function text(x, y, t, anchor) { const e = svg("text", { x, y, "text-anchor": anchor }); e.textContent = t; return e; }
// read writes the values of a chart at its cursor into its legend, the newest ones where there is none.
function read(id) {
  const s = charts[id], c = s.c, legend = $(id).querySelector(".legend");
  let at = s.at;
  s.cursor.replaceChildren();
  if (at !== null) {
    at = Math.max(0, Math.min(c.xs.length - 1, at));
    s.cursor.append(svg("line", { class: "cursor", x1: s.X(c.xs[at]), x2: s.X(c.xs[at]), y1: M.top, y2: M.top + s.ih }));
  }
  if (!legend) return;
  const items = c.lines.map(l => {
    let v = at === null ? null : l.values[at];
    if (at === null) for (let i = l.values.length - 1; i >= 0 && i >= l.values.length - 12 && !is(v); i--) v = l.values[i];
    return el("span", l.name + " " + c.value(v), l.cls);
  });
  for (const m of c.notes || []) items.push(el("span", m.name, m.cls));
  if (at !== null && c.xs.length) items.push(el("span", c.when(c.xs[at]), "soft"));
  legend.replaceChildren(...items);
}
for (const s of document.querySelectorAll(".chart")) {
  const box = s.querySelector("svg");
  const move = to => { const k = charts[s.id]; if (!k || !k.c.xs.length) return; k.at = to; k.held = to !== null; read(s.id); };
  box.addEventListener("pointermove", e => {
    const k = charts[s.id];
    if (!k || !k.c.xs.length) return;
    const x = e.offsetX;
    let best = 0;
    k.c.xs.forEach((v, i) => { if (Math.abs(k.X(v) - x) < Math.abs(k.X(k.c.xs[best]) - x)) best = i; });
    move(best);
  });
  box.addEventListener("pointerleave", () => move(null));
  box.addEventListener("blur", () => move(null));
  box.addEventListener("keydown", e => {
    const k = charts[s.id];
    if (!k || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(e.key)) return;
    e.preventDefault();
    const n = k.c.xs.length - 1, at = k.at === null ? n + 1 : k.at;
    move(e.key === "Escape" ? null : e.key === "Home" ? 0 : e.key === "End" ? n : Math.max(0, Math.min(n, at + (e.key === "ArrowLeft" ? -1 : 1))));
  });
}

// ---- history

const names = ["at_s", "took_s", "hit_rate", "asked_tokens", "hit_tokens", "lookups", "stored_bytes", "retrieved_bytes", "below_bytes", "evicted_bytes", "used", "lookup_p50_s", "lookup_p99_s"];
const KEEP = 720;
let past = null, range = 15;
function remember(h, whole) {
  if (!h) return;
  if (whole || !past) { past = { last: h.last }; for (const n of names) past[n] = (h[n] || []).slice(); return; }
  const fresh = Math.min(h.last - past.last, (h.at_s || []).length);
  if (fresh <= 0) return;
  for (const n of names) { past[n].push(...h[n].slice(h[n].length - fresh)); past[n].splice(0, Math.max(0, past[n].length - KEEP)); }
  past.last = h.last;
}
// slice returns the points of the range; of an hour four make one.
function slice(now) {
  const by = range === 60 ? 4 : 1, from = now - range * 60, out = { xs: [] };
  for (const n of names) out[n] = [];
  const first = past.at_s.findIndex(v => v >= from);
  if (first < 0) return out;
  for (let i = first - (past.last - past.at_s.length + first) % by; i < past.at_s.length; i += by) {
    const at = [];
    for (let k = Math.max(i, first); k < Math.min(i + by, past.at_s.length); k++) at.push(k);
    if (!at.length) continue;
    const mean = n => at.reduce((s, k) => s + past[n][k], 0) / at.length, known = n => at.map(k => past[n][k]).filter(is);
    for (const n of ["lookups", "stored_bytes", "retrieved_bytes", "below_bytes", "evicted_bytes"]) out[n].push(mean(n));
    const asked = mean("asked_tokens");
    out.hit_rate.push(asked > 0 ? Math.min(1, mean("hit_tokens") / asked) : null);
    const p50 = known("lookup_p50_s"), p99 = known("lookup_p99_s");
    out.lookup_p50_s.push(p50.length ? p50.reduce((a, b) => a + b) / p50.length : null);
    out.lookup_p99_s.push(p99.length ? Math.max(...p99) : null);
    out.xs.push(past.at_s[at[at.length - 1]] - now);
  }
  return out;
}
function drawCharts(now, curves) {
  if (!past) return;
  const p = slice(now), minutes = range * 60, d = { 5: 60, 15: 300, 60: 600 }[range];
  const x = { at: v => 1 + v / minutes, ticks: [] };
  for (let v = -minutes; v <= 0; v += d) x.ticks.push([v, v ? "−" + -v / 60 + " min" : "now"]);
  const when = v => { const at = Date.now() + 1000 * v; return span(-v) + " ago, " + clock(at); };
  const gap = range === 60 ? 60 : 16, common = { xs: p.xs, x, when, gap }, most = lists => Math.max(0, ...lists.flat().filter(is));
  const label = (what, lines) => what + ", the last " + range + " minutes: " + lines;
  const possible = curves && curves.length > 1 && curves[1].asked_chunks ? curves[1].ceiling : null;
  draw("hit", { ...common, lines: [{ name: "hit", cls: "a", values: p.hit_rate, area: true }], notes: is(possible) ? [{ y: possible, cls: "c", name: "possible (1 h) " + percent(possible) }] : [], y: linear(1), tick: v => Math.round(100 * v) + " %", value: percent, none: "no prompt was asked for", label: label("Hit rate", "newest " + percent(p.hit_rate[p.hit_rate.length - 1])) });
  const bytes = [["stored", "a", p.stored_bytes], ["retrieved", "b", p.retrieved_bytes], ["from tiers", "c", p.below_bytes], ["evicted", "e", p.evicted_bytes]];
  draw("speed", { ...common, lines: bytes.map(([name, cls, values]) => ({ name, cls, values })), y: linear(most(bytes.map(b => b[2])) || 1e6), tick: v => v ? perSecond(v).replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ") : "0", value: perSecond, none: "nothing yet", label: label("Bytes a second", bytes.map(b => b[0]).join(", ")) });
  const times = [...p.lookup_p50_s, ...p.lookup_p99_s].filter(v => is(v) && v > 0);
  draw("time", { ...common, lines: [{ name: "half take at most", cls: "a", values: p.lookup_p50_s }, { name: "99 of 100", cls: "b", values: p.lookup_p99_s }], y: times.length ? logarithmic(Math.min(...times), Math.max(...times)) : logarithmic(1e-5, 1e-3), tick: v => took(v).replace(/\.0+ /, " "), value: took, none: "no lookup", label: label("Time of a lookup, logarithmic", "median and 99th percentile") });
  draw("load", { ...common, lines: [{ name: "lookups", cls: "a", values: p.lookups, area: true }], y: linear(most([p.lookups]) || 1), tick: v => String(+v.toPrecision(6)), value: v => is(v) ? digits(v) + "/s" : "–", none: "no lookup", label: label("Lookups a second", "one line") });
}
let curveOf = 1;
function drawCurve(st) {
  const w = st.hit_curves && st.hit_curves[curveOf];
  const none = "The server does not estimate it.";
  if (!w || !w.asked_chunks) {
    put("more-text", w ? "No prompt of a chunk or more was looked up in that time." : none);
    draw("more", { xs: [], lines: [], y: linear(1), x: { at: v => v, ticks: [] }, tick: percent, value: percent, when: String, none: "", label: "no estimate" });
    return;
  }
  let what = "Hit " + percent(w.hit_rate) + " of " + percent(w.ceiling) + " possible.";
  const now = w.hit_rate, gain = w.curve.find(q => q.bytes > st.l1.total_bytes && q.hit_rate - now >= .8 * (w.curve[w.curve.length - 1].hit_rate - now));
  if (gain && gain.hit_rate - now >= .02) what += " " + size(gain.bytes - st.l1.total_bytes) + " more RAM would make it about " + percent(gain.hit_rate) + ".";
  else what += " More RAM would gain less than 2 points.";
  put("more-text", what);
  const xs = w.curve.map(q => q.bytes), low = xs[0], high = xs[xs.length - 1];
  if (xs.length < 2 || !(high > low)) return;
  draw("more", { xs, x: { at: v => Math.log(v / low) / Math.log(high / low), ticks: xs.map(v => [v, size(v)]) }, lines: [{ name: "this policy", cls: "a", values: w.curve.map(q => q.hit_rate), marks: true }, { name: "lru", cls: "b", values: w.curve.map(q => q.lru_hit_rate), marks: true, dash: true }],
    notes: [{ y: w.ceiling, cls: "c", name: "without end " + percent(w.ceiling) }, { x: st.l1.total_bytes, cls: "e", name: "this pool " + size(st.l1.total_bytes) }, ...(w.tiers || []).map(t => ({ y: t.hit_rate, cls: "f", name: "with tier " + t.tier + " " + percent(t.hit_rate) }))],
    y: linear(1), tick: v => Math.round(100 * v) + " %", value: percent, when: v => size(v), none: "", label: "Hit rate by size of the pool: " + w.curve.map(q => size(q.bytes) + " " + percent(q.hit_rate)).join(", ") });
}

// ---- sections

let before = null, now = null, may = "read", lostAt = 0;
const oldBy = { at: 0, rows: {} };

function showTiles(e) {
  const st = e.status, l = st.lookup, pool = st.l1, r = st.recent, act = st.findings.filter(f => !f.normal).length;
  put("t-health", st.healthy ? "healthy" : "not healthy");
  $("t-health").className = "big " + (st.healthy ? "good" : "bad");
  put("t-health-sub", (st.healthy ? "" : st.unhealthy.join("; ") + ". ") + (act ? many(act, "thing") + " to do" : "nothing to do") + ", " + many(e.workers, "worker"));
  put("t-hit", r.asked_tokens ? share(r.hit_tokens, r.asked_tokens) : share(l.hit_tokens, l.asked_tokens));
  const below = Math.min(l.hit_tokens, e.below_tokens);
  put("t-hit-sub", (r.asked_tokens ? "last " + span(r.seconds) + "; since the start " : "since the start ") + share(l.hit_tokens, l.asked_tokens) + (below ? ", " + share(below, l.asked_tokens) + " from tiers" : ""));
  put("t-pool", (100 * pool.usage_ratio).toFixed(0) + " %");
  $("t-meter").setAttribute("width", 100 * Math.min(1, pool.usage_ratio));
  put("t-pool-sub", "of " + size(pool.total_bytes) + "; " + many(pool.resident_chunks, "chunk") + ", " + count(pool.evicted_chunks) + " evicted");
  // The mean of three points: a second is too short where prompts are long.
  const rate = k => { const v = past ? past[k + "_bytes"].slice(-3) : []; return v.length ? v.reduce((a, b) => a + b) / v.length : null; };
  put("t-speed", perSecond(rate("retrieved")));
  put("t-speed-sub", "stored " + perSecond(rate("stored")) + ", from tiers " + perSecond(rate("below")));
  let p50 = null, p99 = null;
  if (past) for (let i = past.at_s.length - 1; i >= 0 && i >= past.at_s.length - 60 && !is(p50); i--) { p50 = past.lookup_p50_s[i]; p99 = past.lookup_p99_s[i]; }
  put("t-time", took(p50));
  put("t-time-sub", is(p50) ? "99 of 100 within " + took(p99) : "no lookup in five minutes");
  const c = e.cost, saved = c.prefill_tokens_per_s > 0 ? l.hit_tokens / c.prefill_tokens_per_s : null;
  put("t-saved", is(saved) ? long(saved) : count(l.hit_tokens));
  put("t-saved-sub", !is(saved) ? "tokens that nobody computed" : "of prefill, at " + count(c.prefill_tokens_per_s) + " tokens/s" + (c.gpu_hour_price > 0 ? "; " + (saved / 3600 * c.gpu_hour_price).toFixed(2) + " of GPU time" : ""));
}
function showFindings(list) {
  for (const [box, of, head] of [["act", list.filter(f => !f.normal), null], ["normal", list.filter(f => f.normal), "normal-head"]]) {
    const sig = JSON.stringify(of);
    $(box).hidden = !of.length;
    if ($(box).sig === sig) continue;
    $(box).sig = sig;
    if (head) put(head, many(of.length, "finding") + " that need" + (of.length === 1 ? "s" : "") + " no action");
    $(box + "-list").replaceChildren(...of.map(f => { const li = el("li", f.what); li.append(el("br"), el("span", f.do, "soft")); return li; }));
  }
}
function showMap(e) {
  const m = e.map, n = m.resident.length, st = e.status, pool = st.l1, cols = 40, rows = Math.max(1, Math.ceil(n / cols)), box = $("map");
  const hue = "abcdefgh", who = e.pool_owners || [], cls = i => i < 0 ? "soft" : i < hue.length && who[i].known ? hue[i] : "rest", name = o => o.known ? salted(o.model_name, o.cache_salt) : "others, or not named since the start";
  const also = [pool.staged_bytes ? size(pool.staged_bytes) + " being written" : "", pool.quarantined_bytes ? size(pool.quarantined_bytes) + " waiting for workers that are gone" : "", pool.allocation_failures ? many(pool.allocation_failures, "store") + " did not fit" : ""].filter(x => x);
  put("pool-text", size(pool.total_bytes - pool.free_bytes) + " of " + size(pool.total_bytes) + " in chunks of " + st.chunk_size + " tokens" + (also.length ? "; " + also.join(", ") : "") + "." + (m.sampled ? " A sample of the chunks stands for all." : ""));
  const sig = JSON.stringify([m, who]);
  if (box.sig === sig) return;
  box.sig = sig;
  box.setAttribute("viewBox", "0 0 " + cols + " " + rows);
  const cells = [];
  for (let i = 0; i < n; i++) {
    const used = Math.min(1, (m.resident[i] + m.staged[i] + m.quarantined[i]) / m.cell_bytes), at = m.owner ? m.owner[i] : 0, x = i % cols + .05, y = Math.floor(i / cols) + .05;
    cells.push(svg("rect", { class: "free", x, y, width: .9, height: .9, rx: .12 }));
    if (!used) continue;
    const r = svg("rect", { x, y, width: .9, height: .9, rx: .12, fill: "currentColor", "fill-opacity": (.3 + .7 * used).toFixed(2), class: m.quarantined[i] ? "d" : cls(at) });
    r.append(svg("title", {}));
    r.firstChild.textContent = (m.quarantined[i] ? "waits for a worker that is gone" : at >= 0 ? "most of it: " + name(who[at]) : "chunks") + ", " + percent(used) + " in use";
    cells.push(r);
  }
  box.replaceChildren(...cells);
  box.setAttribute("aria-label", "What lies where in the pool: " + n + " cells of " + size(m.cell_bytes) + ", " + m.resident.filter(v => v).length + " of them in use");
  const keys = who.map((o, i) => { const li = el("li"); li.append(el("i", undefined, "k " + cls(i)), name(o) + ": " + size(o.bytes) + ", " + share(o.bytes, pool.total_bytes)); return li; });
  if (pool.quarantined_bytes) { const li = el("li"); li.append(el("i", undefined, "k d"), "waits for workers that are gone: " + size(pool.quarantined_bytes)); keys.push(li); }
  $("owners").replaceChildren(...keys);
}
function showBy(e) {
  // "now" compares with what was some seconds ago, so that it does not flicker.
  if (e.now_s - oldBy.at > 10 || e.now_s < oldBy.at) { oldBy.was = oldBy.rows; oldBy.rows = Object.fromEntries(e.by.map(b => [b.model_name + "\n" + b.cache_salt, b])); oldBy.at = e.now_s; }
  const was = oldBy.was || {};
  table("by-list", ["~model", "~tenant", "=since the start", "#hit", "#lately", "#from tiers", "#tokens"], e.by.map(b => {
    const o = was[b.model_name + "\n" + b.cache_salt];
    return [b.model_name || "no name", b.cache_salt || "none", bar(b.hit_tokens, b.asked_tokens, "a", share(b.hit_tokens, b.asked_tokens)), share(b.hit_tokens, b.asked_tokens), o ? share(b.hit_tokens - o.hit_tokens, b.asked_tokens - o.asked_tokens) : "–", share(b.below_tokens, b.asked_tokens), count(b.asked_tokens)];
  }), "No prompt was asked for.");
  put("by-more", e.by_in_all > e.by.length ? "The " + e.by.length + " of " + count(e.by_in_all) + " that asked for most." : "");
}
// The hours of tenants come once a minute. spot is the point of a tenant's line that is read: { of, at }.
let hours = null, spot = null;
const HOUR = 3600, LINE = { w: 150, h: 26 };
const hourName = h => h.others ? "all others" : h.cache_salt, hourKey = h => h.others ? "hours of others" : "hour of " + h.cache_salt;
// hourLine is a tenant's hit rate of the last hour as a small line, from 0 at the bottom to 1 at the top.
function hourLine(h) {
  const name = hourName(h), key = hourKey(h), xs = hours.at_s, end = xs[xs.length - 1], X = v => 1 + (LINE.w - 2) * Math.max(0, 1 + (v - end) / HOUR), Y = v => 2 + (LINE.h - 4) * (1 - v), known = h.hit_rate.filter(is);
  const label = "Hit rate of " + name + ", the last hour: " + (known.length ? percent(Math.min(...known)) + " to " + percent(Math.max(...known)) + ", newest " + percent(known[known.length - 1]) : "not known");
  const s = svg("svg", { class: "hour", viewBox: "0 0 " + LINE.w + " " + LINE.h, role: "img", tabindex: 0, "aria-label": label }, svg("rect", { class: "ground", width: LINE.w, height: LINE.h, rx: 3 }), lineOf({ cls: "a", values: h.hit_rate, area: true }, xs, X, Y, LINE.h, 150), svg("g", {}));
  s.dataset.key = key;
  s.sig = label + JSON.stringify([xs, h]);
  const move = at => { spot = at === null ? null : { of: key, at: Math.max(0, Math.min(xs.length - 1, at)) }; readHour(); };
  s.onpointermove = e => { const to = end + HOUR * (e.offsetX / s.clientWidth - 1); let best = 0; xs.forEach((v, i) => { if (Math.abs(v - to) < Math.abs(xs[best] - to)) best = i; }); move(best); };
  s.onpointerleave = s.onblur = () => move(null);
  s.onkeydown = e => {
    if (!["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(e.key)) return;
    e.preventDefault();
    const n = xs.length - 1, at = spot && spot.of === key ? spot.at : n + 1;
    move(e.key === "Escape" ? null : e.key === "Home" ? 0 : e.key === "End" ? n : at + (e.key === "ArrowLeft" ? -1 : 1));
  };
  s.mark = at => s.lastChild.replaceChildren(...(at === null ? [] : [svg("line", { class: "cursor", x1: X(xs[at]), x2: X(xs[at]), y1: 0, y2: LINE.h })]));
  return s;
}
// readHour says what the point of spot is.
function readHour() {
  for (const s of document.querySelectorAll("svg.hour")) s.mark(spot && s.dataset.key === spot.of && spot.at < hours.at_s.length ? spot.at : null);
  const h = spot && hours.tenants.find(h => hourKey(h) === spot.of);
  if (!h || spot.at >= hours.at_s.length) { put("tenant-read", "The lines are hit rates of the last hour, a point for each minute; arrows read one that has the focus."); return; }
  const ago = now.now_s - hours.at_s[spot.at];
  put("tenant-read", hourName(h) + ", " + span(ago) + " ago, " + clock(Date.now() - 1000 * ago).slice(0, 5) + ": hit " + percent(h.hit_rate[spot.at]) + " of " + count(h.asked_tokens[spot.at]) + " tokens in " + span(hours.took_s[spot.at]));
}
function showTenants(e) {
  const own = Object.fromEntries(e.tenants.map(u => ["=" + u.cache_salt, u])), list = hours ? hours.tenants : [], seen = new Set(list.filter(h => !h.others).map(h => h.cache_salt)), held = spot;
  const row = (name, h, u, others) => {
    const sum = f => h.asked_tokens.reduce((n, v, i) => n + f(i) * v, 0), asked = h ? sum(() => 1) : 0, has = u && u.quota_bytes !== null, pins = u && (u.pin_limit_bytes || u.pinned_objects);
    return [name, h ? hourLine(h) : "–", h ? share(sum(i => h.hit_rate[i] || 0), asked) : "–", h ? count(asked) : "–", has ? size(u.quota_bytes) : "–", has ? size(u.bytes) : "–", has ? size(u.evicted_bytes) : "–", !u || u.ttl_seconds === null ? "–" : u.ttl_seconds < 0 ? "ever" : span(u.ttl_seconds),
      pins ? size(u.pinned_bytes) : "–", pins ? size(u.pin_limit_bytes) : "–", others ? "" : allowed(button("Change…", "tenant " + name, () => deeds.quota(name)), "admin")];
  };
  table("tenant-list", ["~tenant", "^the last hour", "#hit", "#tokens", "#quota", "#has", "#evicted", "#kept for", "#pinned", "#may pin", ""],
    [...list.map(h => row(hourName(h), h, h.others ? undefined : own["=" + h.cache_salt], h.others)), ...e.tenants.filter(u => !seen.has(u.cache_salt)).map(u => row(u.cache_salt, null, u))],
    "No prompt came in the last full minutes, and no tenant has terms of its own: all share the pool, and what is used least goes first.");
  spot = held; // a line that is drawn anew loses the focus for a moment
  $("tenant-read").hidden = !list.length;
  readHour();
  put("tenant-more", e.tenants_in_all > e.tenants.length ? "Of those with terms of their own the first " + e.tenants.length + " of " + count(e.tenants_in_all) + "; kvasir quota has all." : "");
}
function showTiers(st) {
  table("tier-list", ["~tier", "~state", "=hit rate of what it was asked for", "#found", "#has", "#read", "#each", "#written", "#each", "#troubles", ""], st.l2.tiers.map(t => [t.name, el("span", t.state === "ok" ? "ok" : t.state + (t.last_error ? ": " + t.last_error : ""), t.state === "ok" ? "good" : "bad"), bar(t.hits, t.hits + t.misses, "c", share(t.hits, t.hits + t.misses)), share(t.hits, t.hits + t.misses),
    size(t.used_bytes) + (t.limit_bytes > 0 ? " of " + size(t.limit_bytes) : ""), size(t.read_bytes), perSecond(t.read_gb_per_s * 1e9), size(t.write_bytes), perSecond(t.write_gb_per_s * 1e9), count(t.corrupt + t.late + t.failures + t.dropped), allowed(button("Drop…", "tier " + t.name, () => deeds.drop(t.name)), "admin")]), "There is none: what is evicted is gone.");
  put("tier-text", st.l2.tiers.length ? size(st.l2.waiting_bytes) + " wait to be written; " + many(st.l2.lost_chunks, "chunk") + " went before they were; " + many(st.l2.late_lookups, "lookup") + " did not wait for all." : "");
}
let list = "last";
function showLists(e) {
  if (list === "last") table("request-list", ["~request", "#hit", "#ms", "#at"], e.requests.map(r => [link(r.request_id, salted(r.model_name, r.cache_salt)), share(r.hit_tokens, r.asked_tokens), Math.max(0, ...r.spans.map(s => s.from_ms + s.ms)).toFixed(1), clock(r.at)]), "None came.");
  else if (list === "ended") table("request-list", ["~request", "#hit", ">why no more"], e.ended.map(x => [link(x.request_id, salted(x.model_name, x.cache_salt)), share(x.hit_tokens, x.asked_tokens), x.text]), "None.");
  else table("request-list", ["~request", "operation", "#ms", "#at"], e.slow.slice(0, 16).map(s => [link(s.request_id), s.operation, (1000 * s.seconds).toFixed(1), clock(s.at)]), "None took a millisecond in ten minutes.");
  if (!chosen && e.requests.length) showRequest(e.requests[0]);
  else if (chosen) { const here = e.requests.find(r => r.request_id === chosen); if (here) showRequest(here); }
}
let chosen = "";
function choose(id) {
  chosen = id;
  $("request").value = id;
  const here = now && now.requests.find(r => r.request_id === id);
  if (here) { showRequest(here); return; }
  ask("GET", "explain?limit=1&request_id=" + encodeURIComponent(id)).then(got => {
    if (id !== chosen) return;
    const r = got.body && got.body.requests && got.body.requests[0];
    if (r) { showRequest(r); return; }
    put("request-text", got.status === 200 ? "Request " + id + " is not remembered: it is older than the last 1,024, or never came." : got.text);
    table("waterfall", [""], [], "");
  });
}
// showRequest draws what a request asked for as bars, and between a prepare and its commit the engine's own copy.
function showRequest(r) {
  const rows = [];
  r.spans.forEach((s, i) => {
    const kind = s.operation.includes("store") ? "c" : s.operation.includes("retrieve") ? "b" : s.operation === "wait" ? "d" : "a";
    if (s.operation.startsWith("commit_")) {
      let j = i - 1;
      while (j >= 0 && r.spans[j].operation !== s.operation && r.spans[j].operation !== s.operation.replace("commit", "prepare")) j--;
      if (j >= 0 && r.spans[j].operation !== s.operation) {
        const from = r.spans[j].from_ms + r.spans[j].ms;
        rows.push({ name: "the engine copies", from: from, ms: Math.max(0, s.from_ms - from), cls: kind });
      }
    }
    rows.push({ name: (s.operation === "wait" ? "waits for tiers or checksums" : s.operation) + (s.count > 1 ? " × " + s.count : ""), from: s.from_ms, ms: s.ms, cls: kind });
  });
  const all = Math.max(...rows.map(x => x.from + x.ms), 0.001);
  put("request-text", r.request_id + ", " + (r.model_name || "no lookup") + (r.cache_salt ? ", tenant " + r.cache_salt : "") + ": " + count(r.hit_tokens) + " of " + count(r.asked_tokens) + " tokens hit, " + count(r.below_tokens) + " of them from tiers; " + all.toFixed(1) + " ms in all, from " + clock(r.at) + (r.more ? "; " + many(r.more, "more operation") : ""));
  table("waterfall", ["what", "#at ms", "#ms", "=when"], rows.map(x => {
    const b = svg("svg", { class: "bar " + x.cls, viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": x.name + " from " + x.from.toFixed(1) + " to " + (x.from + x.ms).toFixed(1) + " ms" }, svg("rect", { class: "ground", width: 1000, height: 10 }), svg("rect", { x: Math.min(996, 1000 * x.from / all), y: 0, width: Math.max(4, 1000 * x.ms / all), height: 10, fill: "currentColor" }));
    b.sig = x.from + " " + x.ms;
    return [x.name, x.from.toFixed(2), x.ms.toFixed(2), b];
  }), "It asked for nothing.");
}
const states = { computing: "P computes", waiting: "waits for D", sending: "sending", done: "done", failed: "failed", expired: "expired" };
function showTransfers(pd) {
  const seen = pd.seen || [], last = pd.transfers || [], engines = pd.p_engines;
  $("pd").hidden = !seen.length && !engines;
  if ($("pd").hidden) return;
  put("pd-text", !seen.length ? "The registry alone sees no transfers: P sends straight to D. A relay or a proxy in this process would show them. What the registry knows:" :
    seen.includes("relay") ? "What went through the relay" + (seen.includes("proxy") ? ", or was asked for by the proxy" : "") + ". GB/s is that of the last hop." :
      "What the proxy asked for: P sends straight to D, so bytes are not known here, and a transfer counts as done with D's first byte.");
  for (const id of ["pairs", "h-pd-list", "pd-list", "pd-key"]) $(id).hidden = !seen.length;
  const host = u => u.replace(/^https?:\/\//, ""), pairs = {};
  for (const t of last) {
    const k = host(t.from) + " → " + host(t.to), p = pairs[k] = pairs[k] || { n: 0, bad: 0, bytes: 0, ms: [], rates: [] };
    p.n++;
    p.bad += t.state === "failed" || t.state === "expired" ? 1 : 0;
    p.bytes += t.bytes || 0;
    if (t.state === "done") p.ms.push(t.ms);
    if (t.gb_per_s) p.rates.push(t.gb_per_s);
  }
  const middle = l => { l.sort((a, b) => a - b); return l.length ? l[l.length >> 1] : null; }, largest = Math.max(0, ...Object.values(pairs).map(p => p.bytes || p.n));
  table("pairs", ["~P → D", "=share of the bytes", "#transfers", "#failed", "#bytes", "#median ms", "#median GB/s"], Object.entries(pairs).sort((a, b) => (b[1].bytes || b[1].n) - (a[1].bytes || a[1].n)).map(([k, p]) => {
    const ms = middle(p.ms), gb = middle(p.rates);
    return [k, bar(p.bytes || p.n, largest, "a", size(p.bytes)), count(p.n), p.bad ? el("span", count(p.bad), "bad") : "0", p.bytes ? size(p.bytes) : "–", is(ms) ? ms.toFixed(1) : "–", is(gb) ? gb.toFixed(2) : "–"];
  }), "No transfer came.");
  table("pd-list", ["state", "~transfer", "=its time", "~P → D", "~model", "#blocks", "#size", "#ms", "#GB/s"], last.map(t => {
    const all = Math.max(t.ms, 0.001), id = el("div", t.transfer_id || "no id");
    id.append(el("div", t.request_id + (t.source && t.source !== "P" ? ", from " + t.source : ""), "soft"));
    if (t.why) id.append(el("div", t.why, "bad"));
    const end = t.steps[t.steps.length - 1], running = t.state === "sending" && t.bytes > 0 && end ? share(end.bytes, t.bytes) + " of " : "";
    const b = svg("svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": t.steps.map(s => s.what + " " + s.ms.toFixed(1) + " ms").join(", ") });
    t.steps.forEach(s => b.append(svg("rect", { x: Math.min(997, 1000 * s.from_ms / all), y: 0, width: Math.max(3, 1000 * s.ms / all), height: 10, fill: "currentColor", class: s.state === "computing" ? "a soft-fill" : s.state === "waiting" ? "d" : s.what === "P sends" ? "b" : "a" })));
    b.sig = b.getAttribute("aria-label");
    return [el("span", states[t.state] || t.state, t.state === "failed" || t.state === "expired" ? "bad" : t.state === "done" ? "good" : "b"), id, b, host(t.from) + " → " + host(t.to) + (t.rank ? ", " + t.rank : ""), t.model_name || "–", t.blocks ? count(t.blocks) : "–", t.bytes ? running + size(t.bytes) : "–", t.ms.toFixed(1), t.gb_per_s ? t.gb_per_s.toFixed(2) : "–"];
  }), "None came.");
  $("p-list").hidden = !engines;
  if (engines) table("p-list", ["~engine of P, by the registry", "~host", "#workers", "#heard", "~D sees it"], engines.map(e => [e.engine_id + (e.dp_rank ? ", DP rank " + e.dp_rank : ""), e.host, count(e.workers), span(e.heard_s) + " ago", e.shown ? "yes" + (e.lease ? "" : "; it registered once") : "no: " + e.why]), "No engine of P is registered.");
}
function showEngines(e) {
  $("engines").hidden = !e.engines;
  if (!e.engines) return;
  table("engine-list", ["~engine", "role", "~state", "#requests", "~models", ""], e.engines.map(x => [x.url, x.role, el("span", x.reason || (x.draining ? "drained: no new requests" : x.well ? "well" : "does not answer"), x.draining || x.reason ? "b" : x.well ? "good" : "bad"), count(x.requests), (x.models || []).join(", ") || "–",
    allowed(button(x.draining ? "Let in…" : "Drain…", "engine " + x.url + x.role, () => deeds.drain(x)), "admin")]), "It has none.");
}
// showParts shows relay, registry and proxy: since the start, and now where a figure is a counter.
function showParts(parts, was, dt) {
  const rows = [], of = (part, name) => (parts[part][name] || 0);
  const grown = (part, name) => was && was[part] && dt > 0 ? Math.max(0, of(part, name) - (was[part][name] || 0)) / dt : null;
  const each = (part, name) => { const v = grown(part, name); return v === null ? "–" : v.toFixed(1) + "/s"; };
  const counter = (what, part, name) => rows.push([what, count(of(part, name)), each(part, name)]);
  if (parts && parts.relay) {
    counter("relay: transfers pulled from P", "relay", "kvasir_relay_pulled_total");
    for (const [what, name] of [["relay: KV pulled from P", "kvasir_relay_pulled_bytes_total"], ["relay: KV pushed to D", "kvasir_relay_pushed_bytes_total"]]) rows.push([what, size(of("relay", name)), perSecond(grown("relay", name))]);
    counter("relay: D served from P", "relay", 'kvasir_relay_served_total{from="p"}');
    counter("relay: D served from memory", "relay", 'kvasir_relay_served_total{from="memory"}');
    counter("relay: failed, D computes", "relay", "kvasir_relay_failed_total");
    rows.push(["relay: kept", count(of("relay", "kvasir_relay_kept_transfers")) + ", " + size(of("relay", "kvasir_relay_kept_bytes")), ""]);
  }
  if (parts && parts.bootstrap) {
    rows.push(["registry: engines of P, complete ones", count(of("bootstrap", "kvasir_bootstrap_engines")) + ", " + count(of("bootstrap", "kvasir_bootstrap_engines_shown")), ""],
      ["registry: workers", count(of("bootstrap", "kvasir_bootstrap_workers")), ""]);
    counter("registry: queries", "bootstrap", "kvasir_bootstrap_queries_total");
  }
  if (parts && parts.proxy) {
    rows.push(["proxy: requests in progress, waiting", count(of("proxy", "kvasir_proxy_requests_in_flight")) + ", " + count(of("proxy", "kvasir_proxy_requests_queued")), ""]);
    counter("proxy: answered", "proxy", 'kvasir_proxy_requests_total{outcome="ok"}');
    rows.push(["proxy: failed", count(of("proxy", 'kvasir_proxy_requests_total{outcome="failed"}') + of("proxy", 'kvasir_proxy_requests_total{outcome="no_engine"}')), ""]);
    counter("proxy: tried again", "proxy", "kvasir_proxy_retries_total");
  }
  $("parts").hidden = !rows.length;
  if (rows.length) table("part-list", ["~what", "#in all", "#now"], rows, "");
}
function showWorkers(e) {
  const st = e.status;
  table("worker-list", ["~model", "~mode", "#world", "#chunk", "#heard"], st.workers.map(w => [w.model_name, w.refused ? el("span", "refused: " + w.refused, "bad") : w.mode + (w.asleep ? ", asleep" : "") + (w.cannot_map_shm ? ", through the socket" : ""), count(w.world_size), size(w.chunk_bytes), span(w.silent_s) + " ago"]), "No engine has registered.");
  put("session-text", many(st.active_sessions, "session") + ", " + many(st.l1.transfers, "chunk") + " in transfer" + (e.workers > st.workers.length ? "; the first " + st.workers.length + " of " + many(e.workers, "worker") : "") + ".");
}
function showReasons(st, old) {
  const reasons = Object.entries(st.lookup.miss_reasons).sort((a, b) => b[1] - a[1]), sum = reasons.reduce((n, r) => n + r[1], 0);
  table("reasons", ["~reason", "=share", "#share", "#in all", "#now"], reasons.map(([why, n]) => [why, bar(n, sum, "b", share(n, sum)), share(n, sum), count(n), old ? count(Math.max(0, n - (old.status.lookup.miss_reasons[why] || 0))) : "–"]), "No lookup has ended before the end of its prompt.");
}
function show(e) {
  if (e.may) may = e.may;
  const st = e.status;
  let old = before;
  if (e.may || old && (old.status.pid !== st.pid || old.status.started !== st.started || e.now_s <= old.now_s)) old = null;
  remember(e.history, !!e.may);
  if (e.tenant_hours) hours = e.tenant_hours;
  before = now = e;
  lostAt = 0;
  $("main").className = "";
  $("login").hidden = true;
  put("state", st.healthy ? "healthy" : "not healthy");
  $("state").className = "pill " + (st.healthy ? "good" : "bad");
  put("who", short(st.version) + ", process " + st.pid + ", up " + span(st.uptime_s));
  $("who").title = "kvasir " + st.version + ", since " + st.started;
  showPeers(e.peers || []);
  if (!painted) measure();
  showTiles(e);
  drawCharts(e.now_s, st.hit_curves);
  if (painted) { showRest(e, old); return; }
  painted = true; // what is seen first comes first
  requestAnimationFrame(() => { performance.mark("figures"); setTimeout(() => { if (now === e) showRest(e, old); }); });
}
function showRest(e, old) {
  const st = e.status;
  showFindings(st.findings);
  drawCurve(st);
  showReasons(st, old);
  showBy(e);
  showMap(e);
  showTiers(st);
  showTenants(e);
  showLists(e);
  showTransfers(e.pd);
  showEngines(e);
  showParts(e.parts, old ? old.parts : null, old ? e.now_s - old.now_s : 0);
  showWorkers(e);
  showMay();
}
let painted = false;
function showPeers(list) {
  const sig = JSON.stringify(list);
  if ($("peers").sig === sig) return;
  $("peers").sig = sig;
  $("peers").hidden = !list.length;
  $("peers").replaceChildren(el("span", list.length === 1 ? "Other node:" : "Other nodes:", "soft"), ...list.filter(u => /^https?:\/\//.test(u)).map(u => { const a = el("a", u.replace(/^https?:\/\//, "").replace(/\/$/, "")); a.href = u; a.rel = "noreferrer"; return a; }));
}

// ---- asking the server

let token = sessionStorage.getItem("kvasir-token") || "", stream = null, paused = false, timer = 0;
const head = () => token ? { Authorization: "Bearer " + token } : {};
// ask returns { status, body, text }: text says what went wrong, empty where nothing did; status 0: no answer.
async function ask(method, path, body) {
  try {
    const r = await fetch(path, { method, headers: { ...head(), ...(body === undefined ? {} : { "Content-Type": "application/json" }) }, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" });
    const t = await r.text();
    let got = null;
    try { got = JSON.parse(t); } catch { /* not every error is JSON */ }
    const why = got && (got.error || got.detail);
    return { status: r.status, body: got, text: r.ok && !why ? "" : "The server answered " + r.status + ": " + (why && why.message || why || t.slice(0, 200) || r.statusText) };
  } catch { return { status: 0, body: null, text: "The server did not answer." }; }
}
const longest = 8 << 20; // of an event; a server never sends one
async function connect() {
  clearTimeout(timer);
  const mine = stream = new AbortController();
  let why = "no answer";
  try {
    const r = await fetch("live", { headers: head(), signal: mine.signal, cache: "no-store" });
    if (r.status === 401) { signIn(token ? "That token is unknown, or its time is over." : ""); return; }
    if (!r.ok) { let t = await r.text(); try { t = JSON.parse(t); t = t.error || t.detail; } catch { /* as it is */ } why = t; throw new Error(why); }
    $("leave").hidden = !token;
    const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { value, done } = await reader.read();
      if (done || mine !== stream) break;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) if (text.startsWith("data: ")) try { show(JSON.parse(text.slice(6, end))); } catch (e) { console.error(e); } // the rest of the page goes on
      if (text.length > longest) { mine.abort(); break; }
    }
  } catch { if (mine.signal.aborted) return; }
  if (mine !== stream || paused) return;
  lose(why);
  timer = setTimeout(connect, 1500);
}
function lose(why) {
  lostAt = lostAt || performance.now();
  put("state", why + " for " + span((performance.now() - lostAt) / 1000) + (now ? ", figures are old" : ""));
  $("state").className = "pill bad";
  $("main").className = now ? "old" : "";
}
function signIn(why) {
  put("state", "asks for a token");
  $("state").className = "pill";
  put("login-error", why);
  $("login").hidden = false;
  $("leave").hidden = true;
  $("token").value = "";
  $("token").focus();
}
$("enter").onclick = () => { const t = $("token").value.trim(); if (!t) return; token = t; sessionStorage.setItem("kvasir-token", t); connect(); };
$("token").onkeydown = e => { if (e.key === "Enter") $("enter").click(); };
$("leave").onclick = () => { token = ""; sessionStorage.removeItem("kvasir-token"); location.reload(); };

// ---- deeds

const scopes = ["read", "write", "admin"];
const mayDo = scope => scopes.indexOf(may) >= scopes.indexOf(scope);
const needs = { clear: "admin", drop: "admin", quota: "admin", pin: "write", prefetch: "write", drain: "admin" };
function allowed(b, scope) { b.disabled = !mayDo(scope); b.sig += b.disabled; return b; }
function showMay() {
  for (const b of document.querySelectorAll("[data-deed]")) b.disabled = !mayDo(needs[b.dataset.deed]) || b.dataset.deed === "drop" && !now.status.l2.tiers.length;
  put("may", mayDo("admin") ? "Each says first what it will do." : mayDo("write") ? "This token may pin and prefetch; the rest needs the scope admin." : token ? "This token may look. Changes need one with the scope write or admin." : "From here you may look. Changes need a browser on the server's host, or a server with --token-file and a token.");
}
let current = null;
// open shows a deed before it is done. d has title, fields of { id, label, type, value, options, hint }, what(values) which says what will happen or
// throws what is wrong, name to be typed, go(values) that returns { text, undo }, danger.
function openDeed(d) {
  current = d;
  put("deed-title", d.title);
  $("deed-fields").replaceChildren(...(d.fields || []).map(f => {
    const l = el("label", f.label + " "), i = el(f.type === "select" || f.type === "textarea" ? f.type : "input");
    i.id = "f-" + f.id;
    i.dataset.field = f.id;
    if (f.type === "select") for (const [v, t] of f.options) { const o = el("option", t); o.value = v; i.append(o); }
    else if (f.type === "checkbox") i.type = "checkbox";
    else { i.autocomplete = "off"; i.spellcheck = false; if (f.hint) i.placeholder = f.hint; }
    if (f.value !== undefined) i.value = f.value;
    i.oninput = i.onchange = say;
    if (f.type === "checkbox") l.prepend(i, " "); else l.append(i);
    return l;
  }));
  $("deed-name").value = "";
  $("deed-result").replaceChildren();
  $("deed-undo").hidden = true;
  $("deed-go").hidden = $("deed-what").hidden = false;
  $("deed-fields").hidden = false;
  $("deed-go").className = d.danger ? "main danger" : "main";
  put("deed-go", d.verb || d.title);
  put("deed-close", "Cancel");
  say();
  if (!$("deed").open) $("deed").showModal();
}
function values() { return Object.fromEntries([...$("deed-fields").querySelectorAll("[data-field]")].map(i => [i.dataset.field, i.type === "checkbox" ? i.checked : i.value.trim()])); }
function say() {
  const d = current;
  let ok = true, what = "", name = "";
  try { const v = values(); what = d.what(v); name = d.name ? d.name(v) : ""; } catch (e) { what = e.message; ok = false; }
  put("deed-what", what);
  $("deed-confirm").hidden = !d.name || !ok;
  put("deed-ask", "Type " + name + " to go on:");
  $("deed-go").disabled = !ok || !!d.name && $("deed-name").value.trim() !== name;
  return ok;
}
$("deed-name").oninput = say;
$("deed-close").onclick = () => $("deed").close();
$("deed-go").onclick = async () => {
  const d = current, v = values();
  $("deed-go").disabled = true;
  put("deed-result", "…");
  const got = await d.go(v);
  if (current !== d) return;
  finish(got);
};
function finish(got) {
  put("deed-result", got.text);
  $("deed-result").className = got.bad ? "bad" : "";
  put("done", got.bad ? "" : got.text);
  if (got.bad) { say(); return; }
  $("deed-go").hidden = $("deed-fields").hidden = $("deed-what").hidden = $("deed-confirm").hidden = true;
  put("deed-close", "Close");
  $("deed-undo").hidden = !got.undo;
  $("deed-undo").onclick = async () => { $("deed-undo").hidden = true; const back = await got.undo(); put("deed-result", back.text); $("deed-result").className = back.bad ? "bad" : ""; put("done", back.text); $("deed-close").focus(); };
  (got.undo ? $("deed-undo") : $("deed-close")).focus();
}
$("deed").addEventListener("keydown", e => { if (e.key === "Enter" && e.target.tagName === "INPUT" && !$("deed-go").disabled && !$("deed-go").hidden) { e.preventDefault(); $("deed-go").click(); } });
const done = (r, text, undo) => r.text ? { text: r.text, bad: true } : { text, undo };
function bytesOf(text, none) {
  if (text === "") return none;
  const m = text.match(/^([0-9]*\.?[0-9]+)\s*([KMGTP]?)i?B?$/i);
  if (!m) throw new Error(text + " is no size, as 20 GiB.");
  return Math.round(m[1] * Math.pow(1024, { "": 3, K: 1, M: 2, G: 3, T: 4, P: 5 }[m[2].toUpperCase()]));
}
function tokensOf(text) {
  const list = text.replace(/[\[\],]/g, " ").split(/\s+/).filter(t => t);
  if (!list.length) throw new Error("Paste the prompt's token ids, as the engine's /tokenize answers them.");
  const bad = list.find(t => !/^[0-9]{1,10}$/.test(t) || +t > 4294967295);
  if (bad) throw new Error(bad.slice(0, 40) + " is no token id.");
  return list.map(Number);
}
const saltName = salt => salt === "" ? "_default" : /^_*_default$/.test(salt) ? "_" + salt : salt;
const saltOf = name => name === "_default" ? "" : /^__+default$/.test(name) && name !== "_default" ? name.slice(1) : name;
function models() { const seen = {}; for (const w of now.status.workers) if (!w.refused) seen[JSON.stringify([w.model_name, w.world_size])] = w.model_name + (w.world_size > 1 ? ", world size " + w.world_size : ""); return Object.entries(seen); }
function promptOf(v) {
  if (!v.model) throw new Error("No worker is registered, so no model is known.");
  const [model, world] = JSON.parse(v.model);
  return { model_name: model, world_size: world, token_ids: tokensOf(v.tokens), cache_salt: saltOf(v.tenant) };
}
const promptFields = () => [{ id: "model", label: "Model", type: "select", options: models() }, { id: "tenant", label: "Tenant (cache salt), empty for none" }, { id: "tokens", label: "Token ids", type: "textarea", hint: "1, 2, 3" }];
// chunkOf is the least chunk size of the model's workers, tokens.
function chunkOf(v) {
  const [model, world] = JSON.parse(v.model), sizes = now.status.workers.filter(w => w.model_name === model && w.world_size === world && w.chunk_tokens > 0).map(w => w.chunk_tokens);
  return sizes.length ? Math.min(...sizes) : now.status.chunk_size;
}
const chunksOf = v => Math.floor(tokensOf(v.tokens).length / chunkOf(v));

const deeds = {
  clear() {
    const tiers = () => now.status.l2.tiers.map(t => t.name).join(", ");
    openDeed({ title: "Clear the cache", verb: "Clear", danger: true, fields: [{ id: "where", label: "Where", type: "select", options: tiers() ? [["all", "the pool and the tiers"], ["l1", "the pool alone"], ["l2", "the tiers alone"]] : [["l1", "the pool"]] }, { id: "force", label: "also what requests in progress use", type: "checkbox" }],
      what: v => "Forgets " + [v.where !== "l2" ? many(now.status.l1.resident_chunks, "chunk") + " (" + size(now.status.l1.resident_bytes) + ") in the pool" : "", v.where !== "l1" ? "all that was stored before in " + tiers() : ""].filter(x => x).join(" and ") + ", of all models and tenants" + (v.force ? ", also those that requests in progress use, which then compute" : "; chunks that requests in progress use stay") + ". Engines compute them again. It cannot be undone.",
      name: () => location.host,
      go: async v => { const r = await ask("POST", "cache/clear", { tier: v.where, force: v.force }); const c = r.body && r.body.cleared; return done(r, c ? "Cleared: " + many(c.chunks, "chunk") + " of the pool." + (c.stays ? " What stays: " + c.stays : "") : ""); } });
  },
  drop(tier) {
    const list = now.status.l2.tiers;
    if (!list.length) return;
    openDeed({ title: "Drop what a tier has", verb: "Drop", danger: true, fields: [{ id: "tier", label: "Tier", type: "select", options: list.map(t => [t.name, t.name]), value: tier || list[0].name }, { id: "model", label: "Only this model, empty for all" }],
      what: v => { const t = now.status.l2.tiers.find(t => t.name === v.tier); return "Removes " + (v.model ? "the objects of " + v.model : t && t.objects ? "all " + count(t.objects) + " objects (" + size(t.used_bytes) + ")" : "all objects") + " from " + v.tier + ", for every server that shares it. The pool keeps what it has. It may take long, and cannot be undone."; },
      name: v => v.tier,
      go: async v => { const r = await ask("POST", "tiers/drop", v.model ? { tier: v.tier, model: v.model } : { tier: v.tier }); return done(r, r.body ? "Removed " + many(r.body.removed, "object") + " from " + v.tier + "." : ""); } });
  },
  quota(tenant) {
    const find = name => now.tenants.find(u => u.cache_salt === name), u = find(tenant || "") || {}, plain = n => is(n) && n > 0 ? size(n) : "";
    const shown = { quota: is(u.quota_bytes) ? size(u.quota_bytes) : "", pins: plain(u.pin_limit_bytes) };
    const exact = (v, field, own) => v.tenant === tenant && v[field] === shown[field] ? own : bytesOf(v[field], null); // what is shown is rounded
    const body = v => ({ quota_bytes: exact(v, "quota", is(u.quota_bytes) ? u.quota_bytes : null), ttl_seconds: v.ttl === "" ? null : v.ttl === "ever" ? -1 : Number(v.ttl), pin_limit_bytes: exact(v, "pins", u.pin_limit_bytes || null) });
    openDeed({ title: "Terms of a tenant", verb: "Set", fields: [{ id: "tenant", label: "Tenant (cache salt); _default has none", value: tenant || "" }, { id: "quota", label: "Guaranteed part of the pool, empty for none", value: shown.quota, hint: "20 GiB" }, { id: "ttl", label: "Seconds that an unused chunk is kept, or ever; empty for as all others", value: is(u.ttl_seconds) ? u.ttl_seconds < 0 ? "ever" : u.ttl_seconds : "", hint: "3600" }, { id: "pins", label: "How much of it may be pinned, empty for nothing", value: shown.pins, hint: "1 GiB" }],
      what: v => {
        if (!v.tenant) throw new Error("Which tenant?");
        const b = body(v), was = find(v.tenant);
        if (b.ttl_seconds !== null && !(b.ttl_seconds === -1 || b.ttl_seconds >= 1)) throw new Error(v.ttl + " is neither a number of seconds nor ever.");
        return "Tenant " + v.tenant + ": " + (is(b.quota_bytes) ? size(b.quota_bytes) + " of the pool's " + size(now.status.l1.total_bytes) + " that no other tenant takes" : "no quota") + "; an unused chunk stays " + (is(b.ttl_seconds) ? b.ttl_seconds < 0 ? "until it is evicted" : span(b.ttl_seconds) : "as long as those of others") + "; " + (is(b.pin_limit_bytes) && b.pin_limit_bytes > 0 ? size(b.pin_limit_bytes) + " may be pinned" : "nothing may be pinned") + ". " + (was ? "It replaces what it has now." : now.tenants_in_all > now.tenants.length ? "It replaces what it may have now." : "It has nothing of its own now.");
      },
      go: async v => {
        const all = await ask("GET", "tenants"); // the page has the first ones alone
        if (all.text) return done(all, "");
        const had = all.body.tenants.find(u => u.cache_salt === v.tenant), was = had ? { quota_bytes: had.quota_bytes, ttl_seconds: had.ttl_seconds, pin_limit_bytes: had.pin_limit_bytes || null } : null, path = "tenants/" + encodeURIComponent(v.tenant);
        const r = await ask("PUT", path, body(v));
        return done(r, "Set for " + v.tenant + (r.body && r.body.kept_in ? "; kept over restarts." : "; it ends with this server (--state keeps it)."), async () => { const b = was ? await ask("PUT", path, was) : await ask("DELETE", path); return done(b, "Undone: " + v.tenant + " has what it had."); });
      } });
  },
  pin() {
    openDeed({ title: "Pin a prompt", verb: "Pin", fields: [...promptFields(), { id: "life", label: "Seconds", value: "3600" }],
      what: v => { promptOf(v); const n = chunksOf(v); if (!n) throw new Error("The prompt is shorter than a chunk of " + chunkOf(v) + " tokens."); if (!(v.life >= 1)) throw new Error("For how many seconds?"); return "Keeps what the pool has of the prompt's first " + many(n, "chunk") + " for " + span(+v.life) + ": nothing evicts it. It counts against what tenant " + saltName(saltOf(v.tenant)) + " may pin."; },
      go: async v => {
        const p = promptOf(v), r = await ask("POST", "cache/pins", { ...p, ttl_seconds: +v.life });
        const undo = async () => { const b = await ask("DELETE", "cache/pins", p); return done(b, b.body ? "Undone: " + many(b.body.affected, "object") + " unpinned." : ""); };
        return done(r, r.body ? many(r.body.affected, "object") + " pinned, of " + many(r.body.requested, "chunk") + "." : "", undo);
      } });
  },
  prefetch() {
    openDeed({ title: "Prefetch a prompt", verb: "Prefetch", fields: promptFields(),
      what: v => { promptOf(v); const n = chunksOf(v); if (!n) throw new Error("The prompt is shorter than a chunk of " + chunkOf(v) + " tokens."); return "Reads what the tiers have of the prompt's first " + many(n, "chunk") + " into the pool, where it takes the room of chunks that are used less."; },
      go: async v => {
        const r = await ask("POST", "cache/prefetches", promptOf(v));
        if (r.text || !r.body.request_id) return done(r, "Nothing to read.");
        for (let i = 0; i < 600; i++) {
          const g = await ask("GET", "cache/prefetches/" + r.body.request_id);
          if (g.text) return done(g, "");
          if (g.body.status === "completed") return { text: count(g.body.found_keys) + " of " + many(g.body.total_keys, "object") + " are in the pool now." };
          await new Promise(ok => setTimeout(ok, 500));
        }
        return { text: "It goes on." };
      } });
  },
  drain(x) {
    const go = on => ask("POST", "engines/" + (on ? "drain" : "undrain") + "?url=" + encodeURIComponent(x.url) + "&role=" + x.role), on = !x.draining;
    openDeed({ title: on ? "Drain an engine" : "Let requests to an engine", verb: on ? "Drain" : "Let in",
      what: () => on ? "The proxy sends no new request to " + x.url + " (" + x.role + "). The " + many(x.requests, "request") + " in progress go on. Other engines take the rest, where there are some." : "The proxy sends requests to " + x.url + " again.",
      go: async () => done(await go(on), on ? x.url + " gets no new requests." : x.url + " gets requests again.", async () => done(await go(!on), on ? "Undone: " + x.url + " gets requests again." : "Undone: " + x.url + " gets no new requests.")) });
  },
};
for (const b of document.querySelectorAll("[data-deed]")) { b.disabled = true; b.onclick = () => deeds[b.dataset.deed](); } // showMay enables them

// ---- buttons and keys

function setPaused(p) {
  if (paused === p) return;
  paused = p;
  $("pause").setAttribute("aria-pressed", p);
  put("pause", p ? "Go on" : "Pause");
  if (p) { clearTimeout(timer); if (stream) stream.abort(); put("state", "paused"); $("state").className = "pill"; } else connect();
}
const themes = ["system", "light", "dark"];
let theme = 0;
function nextTheme() {
  theme = (theme + 1) % themes.length;
  put("theme", "Theme: " + themes[theme]);
  if (theme) document.documentElement.dataset.theme = themes[theme]; else delete document.documentElement.dataset.theme;
}
function press(group, b) { for (const x of document.querySelectorAll("[data-" + group + "]")) x.setAttribute("aria-pressed", x === b); }
function redraw() { measure(); if (now) { drawCharts(now.now_s, now.status.hit_curves); drawCurve(now.status); } }
for (const b of document.querySelectorAll("[data-range]")) b.onclick = () => { range = +b.dataset.range; press("range", b); redraw(); };
for (const b of document.querySelectorAll("[data-window]")) b.onclick = () => { curveOf = +b.dataset.window; press("window", b); redraw(); };
for (const b of document.querySelectorAll("[data-list]")) b.onclick = () => { list = b.dataset.list; press("list", b); if (now) showLists(now); };
$("pause").onclick = () => setPaused(!paused);
$("theme").onclick = nextTheme;
$("show").onclick = () => { const id = $("request").value.trim(); if (id) { if (location.hash === "#request=" + encodeURIComponent(id)) choose(id); else location.hash = "request=" + encodeURIComponent(id); } };
$("request").onkeydown = e => { if (e.key === "Enter") $("show").click(); };
function follow(scroll) {
  const m = location.hash.match(/^#request=(.+)$/);
  if (!m) return;
  let id = m[1];
  try { id = decodeURIComponent(id); } catch { /* as it is */ }
  choose(id.slice(0, 1024));
  if (scroll) $("requests").scrollIntoView({ block: "nearest" });
}
window.onhashchange = () => follow(true);
document.onkeydown = e => {
  if (e.ctrlKey || e.metaKey || e.altKey || ["INPUT", "TEXTAREA", "SELECT"].includes(e.target.tagName) || $("deed").open) return;
  if (e.key === "p") setPaused(!paused);
  else if (e.key === "t") nextTheme();
  else if (e.key === "r") { const all = [...document.querySelectorAll("[data-range]")]; all[(all.findIndex(b => b.getAttribute("aria-pressed") === "true") + 1) % all.length].click(); }
  else if (e.key === "/") { e.preventDefault(); $("request").focus(); $("requests").scrollIntoView({ block: "nearest" }); }
  else if (e.key >= "1" && e.key <= "9") {
    const s = [...document.querySelectorAll("main section:not([hidden])")].filter(s => s.id !== "login")[e.key - 1];
    if (s) { s.tabIndex = -1; s.focus({ preventScroll: true }); s.scrollIntoView({ block: "nearest" }); }
  }
};
let resized = 0;
new ResizeObserver(() => { cancelAnimationFrame(resized); resized = requestAnimationFrame(redraw); }).observe($("main"));
connect();
follow(true);
