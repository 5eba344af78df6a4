// INDEX, above, has the parts of all pages: t title, h heading, u address, x text.
"use strict";
(() => {
  const root = document.body.dataset.root;
  const byId = (id) => document.getElementById(id);

  // light or dark: the system's choice until the reader makes one
  const html = document.documentElement;
  const keep = (value) => { try { localStorage.setItem("theme", value); } catch { /* a page from a disk may have no storage */ } };
  try { const kept = localStorage.getItem("theme"); if (kept) html.dataset.theme = kept; } catch { /* the same */ }
  byId("theme").onclick = () => {
    const dark = html.dataset.theme ? html.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    html.dataset.theme = dark ? "light" : "dark";
    keep(html.dataset.theme);
  };

  byId("menu").onclick = () => byId("menu").setAttribute("aria-expanded", byId("pages").classList.toggle("shown"));
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "center" });

  for (const h of document.querySelectorAll("main h2[id], main h3[id]")) {
    const a = document.createElement("a");
    a.className = "here"; a.href = "#" + h.id; a.textContent = "#"; a.setAttribute("aria-label", "Link to this heading");
    h.append(a);
  }

  for (const pre of document.querySelectorAll("main pre")) {
    const box = document.createElement("div");
    box.className = "code";
    pre.replaceWith(box);
    box.append(pre);
    if (!pre.querySelector(".language-text") && navigator.clipboard) {
      const b = document.createElement("button");
      b.textContent = "Copy";
      b.onclick = async () => { await navigator.clipboard.writeText(pre.innerText); b.textContent = "Copied"; setTimeout(() => { b.textContent = "Copy"; }, 1500); };
      box.append(b);
    }
  }
  for (const td of document.querySelectorAll("td:first-child")) if (td.textContent.length > 40) td.className = "wide";

  // search: parts that have all words; words in titles and headings count more
  const lower = INDEX.map((e) => ({ head: (e.t + " " + (e.h || "")).toLowerCase(), text: e.x.toLowerCase() }));
  const search = (query) => {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const hits = [];
    lower.forEach((e, i) => {
      let score = 0;
      for (const w of words) {
        const inHead = e.head.includes(w), at = e.text.indexOf(w);
        if (!inHead && at < 0) return;
        score += (inHead ? 20 : 0) + (at >= 0 ? 2 + Math.min(5, e.text.split(w).length - 1) : 0);
      }
      if (!INDEX[i].h) score += 3;
      if (INDEX[i].u.startsWith("reference/commands/")) score -= 4;
      hits.push([score, i]);
    });
    hits.sort((a, b) => b[0] - a[0] || a[1] - b[1]);
    return hits.slice(0, 20).map(([, i]) => [INDEX[i], lower[i], words]);
  };
  const snippet = (e, low, words) => {
    const at = Math.max(0, Math.min(...words.map((w) => low.text.indexOf(w)).filter((n) => n >= 0), low.text.length) - 40);
    const out = document.createElement("small");
    const text = (at ? "…" : "") + e.x.slice(at, at + 150).replace(/\s+/g, " ") + "…";
    const pattern = new RegExp("(" + words.map((w) => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|") + ")", "i");
    text.split(pattern).forEach((piece, n) => {
      const node = n % 2 ? document.createElement("mark") : document.createTextNode(piece);
      if (n % 2) node.textContent = piece;
      out.append(node);
    });
    return out;
  };
  const input = byId("search"), found = byId("found");
  const show = () => {
    found.replaceChildren();
    found.hidden = !input.value.trim();
    if (found.hidden) return;
    const hits = search(input.value);
    if (!hits.length) {
      const li = document.createElement("li");
      li.className = "none"; li.textContent = "Nothing has all of these words.";
      found.append(li);
    }
    for (const [e, low, words] of hits) {
      const li = document.createElement("li"), a = document.createElement("a"), b = document.createElement("b");
      a.href = root + e.u;
      b.textContent = e.h ? e.t + " › " + e.h : e.t;
      a.append(b, snippet(e, low, words));
      a.onclick = () => { found.hidden = true; };
      li.append(a);
      found.append(li);
    }
  };
  const asked = new URLSearchParams(location.search).get("q"); // a link may ask: index.html?q=redis
  if (asked) { input.value = asked; show(); }
  input.oninput = show;
  input.onfocus = show;
  const step = (n) => {
    const all = [...found.querySelectorAll("a")], i = all.indexOf(document.activeElement) + n;
    (i < 0 ? input : all[Math.min(i, all.length - 1)])?.focus();
  };
  document.addEventListener("keydown", (e) => {
    if (e.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) { e.preventDefault(); input.focus(); }
    if (e.key === "Escape") { found.hidden = true; input.blur(); }
    if (!found.hidden && (e.key === "ArrowDown" || e.key === "ArrowUp")) { e.preventDefault(); step(e.key === "ArrowDown" ? 1 : -1); }
    if (e.key === "Enter" && document.activeElement === input) found.querySelector("a")?.click();
  });
  document.addEventListener("click", (e) => { if (!e.target.closest(".search")) found.hidden = true; });
})();
