// The frame: which view is shown, of which run, and when it is drawn anew.
"use strict";

(async () => {
  const root = document.getElementById("view"), live = document.getElementById("live");
  const start = await get("start").catch((error) => { root.append(el("p", {className: "refusal"}, error.message)); throw error; });
  let shown = null, pulse = null, drawing = 0, looking = false;

  /** #view?run=0&step=12 */
  function place() {
    const [name, query] = location.hash.slice(1).split("?");
    const view = start.views.find((one) => one.name === name) || start.views[0];
    return {view, query: Object.fromEntries(new URLSearchParams(query || ""))};
  }
  window.go = (changes, name = place().view.name) => {
    const query = {...(name === place().view.name ? place().query : {run: place().query.run}), ...changes};
    const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
    location.hash = given.length ? `${name}?${new URLSearchParams(given)}` : name;
  };

  function frame() {
    const {view, query} = place();
    document.title = `${start.runs.map((run) => run.title).join(", ")}: ${view.title} (evenkeel)`;
    const choice = start.runs.length > 1 && !view.shows_all_runs
      ? el("select", {"aria-label": "Run", onchange: (event) => go({run: event.target.value})},
        start.runs.map((run, i) => el("option", {value: String(i), selected: String(i) === (query.run || "0")}, run.name)))
      : start.runs.map((run) => run.name).join(" · ");
    document.getElementById("run").replaceChildren(choice);
    document.getElementById("views").replaceChildren(...start.views.map((one) =>
      el("a", {href: `#${one.name}${query.run ? `?run=${query.run}` : ""}`, "aria-current": one.name === view.name ? "page" : null}, one.title)));
  }

  async function draw() {
    const {view, query} = place(), number = ++drawing;
    if (shown !== view.name) { dropCharts(); root.replaceChildren(el("p", {className: "soft"}, "Reading the run …")); window.scrollTo(0, 0); }
    shown = view.name;
    frame();
    const focused = document.activeElement?.id, open = new Map([...root.querySelectorAll("details[id]")].map((one) => [one.id, one.open]));
    const made = el("div");
    try {
      await VIEWS[view.name](made, query, start);
    } catch (error) {
      if (number === drawing) root.replaceChildren(el("p", {className: "refusal"}, error.message));
      return;
    }
    if (number !== drawing) return;
    for (const one of made.querySelectorAll("details[id]")) one.open = open.get(one.id) ?? one.open;
    root.replaceChildren(...made.childNodes);
    if (focused && focused !== document.activeElement?.id) document.getElementById(focused)?.focus({preventScroll: true});
  }

  async function look() {
    if (document.hidden || looking) return;  // a view may take longer than the time between two looks: it is drawn, and not begun anew
    looking = true;
    try {
      const before = pulse;
      pulse = JSON.stringify(await get("pulse"));  // before it is drawn: what is written meanwhile is news at the next look
      live.textContent = "live";
      if (pulse !== before && !VIEWS[place().view.name].isStill?.(place().query)) await draw();
    } catch {
      live.textContent = "the server is gone; what you see is what it said last";
    } finally {
      looking = false;
    }
  }

  addEventListener("hashchange", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    const view = start.views[Number(event.key) - 1];
    if (view) go({}, view.name);
  });
  if (frozen) {
    await draw();
    live.textContent = `written ${start.written}`;
  } else {
    pulse = JSON.stringify(await get("pulse").catch(() => null));
    await draw();
    await look();
    setInterval(look, 2000);
  }
})();
