// The pool of rollout workers and the books: who samples, what is under way, what became of every group, what failed and was waited for.
"use strict";

VIEWS.pool = async (root, query, start) => {
  const {charts: curves, steps, workers, book, counters, waits} = await get("pool", {run: query.run, from: query.from, to: query.to});
  if (book) {
    root.append(el("div", {className: "tiles", id: "book"}, tile("groups admitted", short(book.admitted)), tile("trained", short(book.trained)), tile("discarded", short(book.discarded)),
      tile("under way", short(book.outstanding)), tile("admitted = trained + discarded + under way", book.is_balanced === null ? "–" : book.is_balanced ? "balanced" : "NOT balanced", {gridColumn: "span 2"})));
  }
  root.append(el("section", {}, el("h2", {}, "Rollout workers"), el("div", {className: "card scroll", id: "workers"}, workers.length ? table(["worker", "state", "version", "steps", "groups", "tokens", "of all", "waits, mean"],
    workers.map((one) => [one.name, one.state, one.version === null ? "–" : `v${one.version}`, one.steps.join(" to "), short(one.groups), short(one.tokens), one.share === null ? "–" : percent(one.share),
      one.waits === null ? "–" : percent(one.waits)])) : el("p", {className: "soft"}, "None has finished a group of a trained step yet."))));
  root.append(section("Over the steps", curveGrid(curves, steps[1], query, "")));
  root.append(section("Waited for", el("div", {className: "card scroll", id: "waits"}, waits.length ? table(["longest", "what", "notices", "last at"], waits.map((one) => [`${one.seconds} s`, visible(one.what + (one.detail ? ` (${one.detail})` : "")), one.notices, one.time]))
    : el("p", {className: "soft"}, "Nothing that took long enough for a notice."))));
  root.append(section("Failures, and what was given up", el("div", {className: "card scroll", id: "counters"}, counters.length ? table(["count", "of what", ""], counters.map(({name, text, help, value}) =>
    [el("b", {className: value ? "" : "soft"}, text), name, help])) : el("p", {className: "soft"}, "No step is finished yet."))));
};
