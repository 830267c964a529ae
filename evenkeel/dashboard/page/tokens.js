// Trajectories as text: every token coloured by what one asks of it, with all its numbers beside the pointer or the cursor.
"use strict";

// How a token is coloured: its value, where the scale ends, and whether it has two sides. Colours are of Okabe and Ito's set, on any page.
const SIDES = ["0, 114, 178", "213, 94, 0"], ONE_SIDE = "0, 158, 115";
const HUES = {
  ratio: {title: "log ratio, proximal to behaviour", value: (t) => t.proximal - t.behavior, sides: true, ends: [0.02, 3], unit: "nats"},
  drift: {title: "log ratio, target to proximal", value: (t) => t.target - t.proximal, sides: true, ends: [0.02, 3], unit: "nats"},
  all: {title: "log ratio, target to behaviour", value: (t) => t.target - t.behavior, sides: true, ends: [0.02, 3], unit: "nats"},
  mismatch: {title: "mismatch, at sampling to behaviour", value: (t) => t.at_sampling - t.behavior, sides: true, ends: [0.02, 3], unit: "nats", needs: "at_sampling"},
  ageing: {title: "log ratio, proximal to at sampling", value: (t) => t.proximal - t.at_sampling, sides: true, ends: [0.02, 3], unit: "nats", needs: "at_sampling"},
  fate: {title: "what the correction did"},
  version: {title: "weight version", value: (t) => t.versions, steps: true},
  staleness: {title: "staleness", value: (t) => (t.versions < 0 ? NaN : t.learner - t.versions), ends: [1, 8], unit: "versions"},
  entropy: {title: "entropy", value: (t) => t.entropy, ends: [0.1, 5], unit: "nats"},
  advantage: {title: "advantage", value: (t) => t.advantage, sides: true, ends: [0.5, 4], unit: ""},
  weight: {title: "importance weight", value: (t) => Math.log(Math.max(t.importance_weight, 1e-3)), sides: true, ends: [0.02, 3], unit: "log"},
  set: {title: "kept set of the draw", value: (t) => t.kept_set || NaN, ends: [1, 500], unit: "tokens", needs: "kept_set"},
  behavior: {title: "surprise of the sampler, −log mu", value: (t) => -t.behavior, ends: [0.5, 8], unit: "nats"},
};
// What may have happened to a token, by class in the style sheet: colours and lines, so that no colour has to be told apart alone.
const FATES = {
  kept: "kept, weight 1", weighted: "kept, weighted", cut: "kept, weight cut to a bound", clipped: "kept, no gradient: clipped by the trust region",
  none: "kept, weight 0", dropped: "dropped", read: "read, not sampled",
};

const TOGETHER = 25;  // trajectories that a browser thinks of at once: one that changes moves no more of them
const MOST_MS = 6;  // of a frame's 16 go to making tokens: a wheel finds each frame ready

VIEWS.tokens = async (root, query) => {
  const {kept, kind, step, sample, found, most_found, refused} = await get("tokens", {run: query.run, kind: query.kind, step: query.step,
    ...(query.find ? {find: query.find, low: query.low, high: query.high, length: query.length, longest: query.longest} : {})});
  const has = sample && sample.columns.target ? Object.keys(HUES).filter((name) => !HUES[name].needs || sample.columns[HUES[name].needs]) : ["behavior", "version"];
  const hue = has.includes(query.colour) ? query.colour : has[0];
  const steps = kept[kind], place = steps.indexOf(step);
  const to = (changes) => go({group: null, ...changes});
  const choose = (label, name, options, chosen) => el("label", {}, label, el("select", {id: `choose-${name}`, onchange: ({target}) => go({[name]: target.value})},
    options.map(([value, text]) => el("option", {value, selected: value === chosen}, text))));
  const type = (label, name, more = {}) => el("label", {}, label, el("input", {id: `type-${name}`, value: query[name] || "", onchange: ({target}) => go({[name]: target.value}), ...more}));

  root.append(el("div", {className: "controls"},
    el("label", {}, "Of", el("select", {id: "choose-kind", onchange: ({target}) => to({kind: target.value, step: null})},
      [["step", "training batches"], ["held_out", "evaluations"]].map(([value, text]) => el("option", {value, selected: value === kind}, text)))),
    el("button", {id: "earlier", disabled: place <= 0, onclick: () => to({step: steps[place - 1]})}, "← earlier"),
    el("label", {}, "Step", el("select", {id: "choose-step", onchange: ({target}) => to({step: target.value})},
      el("option", {value: "", selected: !query.step}, "the newest"), [...steps].reverse().map((one) => el("option", {value: String(one), selected: String(one) === query.step}, one)))),
    el("button", {id: "later", disabled: place < 0 || place >= steps.length - 1, onclick: () => to({step: steps[place + 1]})}, "later →"),
    choose("Colour by", "colour", has.map((name) => [name, HUES[name].title]), hue),
    frozen ? null : type("Find in all steps", "find", {type: "search", size: 26, placeholder: "words of question or answer"})));
  if (found) root.append(foundTable(found, most_found, to));
  if (!sample) {
    root.append(refused ? el("p", {className: "refusal"}, refused) : el("p", {className: "soft"}, steps.length ? `Of step ${step} no trajectories are kept. Kept are the last 200 steps, and each fiftieth before.`
      : "No trajectories are kept token by token yet. A run keeps some of each step (metrics.trajectories_per_step)."));
    return;
  }

  const rows = sample.answers.map((answer, i) => ({...answer, i, tokens: sample.offsets[i + 1] - sample.offsets[i]}));
  const low = query.low ? Number(query.low) : -Infinity, high = query.high ? Number(query.high) : Infinity;
  const words = (query.words || "").toLowerCase();
  const text = (row) => { let all = ""; for (let k = sample.offsets[row.i]; k < sample.offsets[row.i + 1]; k++) all += sample.pieces[sample.columns.token_ids[k]]; return all; };
  const chosen = rows.filter((row) => (query.group === undefined || String(row.group) === query.group)
    && (row.reward === null ? !query.low && !query.high : row.reward >= low && row.reward <= high)
    && row.tokens >= Number(query.length || 0) && row.tokens <= Number(query.longest || Infinity) && (!words || `${row.prompt_id}\n${row.expected}\n${text(row)}`.toLowerCase().includes(words)));
  const orders = {place: (a, b) => a.i - b.i, reward: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity), length: (a, b) => b.tokens - a.tokens};
  chosen.sort(orders[query.order] || orders.place);

  root.append(batch(sample, rows, query, to, kind === "step"));
  root.append(el("h2", {}, `${chosen.length} of ${rows.length} trajectories of ${kind === "step" ? "step" : "the evaluation after step"} ${step}`,
    query.group !== undefined ? el("button", {id: "all-groups", className: "beside", onclick: () => go({group: null})}, `group ${query.group} ×`) : null));
  root.append(el("div", {className: "controls"},
    type("Reward from", "low", {type: "number", step: "any", className: "narrow"}), type("to", "high", {type: "number", step: "any", className: "narrow"}),
    type("Tokens from", "length", {type: "number", className: "narrow"}), type("to", "longest", {type: "number", className: "narrow"}), type("With the words", "words", {type: "search"}),
    choose("Order", "order", [["place", "as they came"], ["reward", "reward"], ["length", "length"]], query.order || "place")));
  root.append(key(hue, sample));

  const list = el("div"), near = new Set();
  const seen = new IntersectionObserver((entries) => {
    if (!near.size) requestAnimationFrame(make);
    for (const {target, isIntersecting} of entries) near[isIntersecting ? "add" : "delete"](target);
  }, {rootMargin: "800px"});
  const make = () => {
    const end = performance.now() + MOST_MS;
    for (const one of near) {
      near.delete(one);
      seen.unobserve(one);
      fill(one.querySelector(".tokens"), sample, hue);
      if (performance.now() > end) break;
    }
    if (near.size) requestAnimationFrame(make);
  };
  let some;
  for (const [place, row] of chosen.entries()) {
    if (place % TOGETHER === 0) {
      const height = chosen.slice(place, place + TOGETHER).reduce((sum, {tokens}) => sum + 92 + tokens, 0);
      list.append(some = el("div", {className: `answers ${query.group !== undefined ? "beside-each-other" : ""}`, style: {containIntrinsicHeight: `auto ${height}px`}}));
    }
    const body = el("div", {className: "tokens", tabIndex: 0, role: "group", "aria-label": `Tokens of group ${row.group}, answer ${row.answer}; arrow keys go from one to the next`});
    body.row = row;
    const part = Object.entries(row.parts || {}).map(([name, value]) => `${name} ${short(value)}`).join(", ");
    const one = el("article", {className: "card answer", style: {containIntrinsicHeight: `auto ${80 + row.tokens}px`}},
      el("header", {}, el("b", {}, `group ${row.group}, answer ${row.answer}${row.sequence ? `, sequence ${row.sequence}` : ""}`), el("span", {className: "reward"}, row.error ? "no reward" : `reward ${short(row.reward)}`),
        sample.columns.advantage ? el("span", {}, `advantage ${short(firstOf(sample, row, "advantage"))}`) : null,
        el("span", {className: "soft"}, `${row.tokens} tokens, ended by ${row.finish}${part ? `; ${part}` : ""}`), el("span", {className: "soft"}, `expected: ${visible(row.expected)}`)),
      row.error ? el("p", {className: "refusal"}, visible(row.error)) : null, body,
      row.left_out ? el("p", {className: "soft"}, `${row.left_out} more tokens are not kept.`) : null);
    some.append(one);
    seen.observe(one);
  }
  pointAt(list, sample);
  root.append(chosen.length ? list : el("p", {className: "soft"}, "None is like that."));
};

// A step that was asked for stays as it is: what is being read isn't drawn anew because another step has come.
VIEWS.tokens.isStill = (query) => Boolean(query.step);

function firstOf(sample, row, name) {
  for (let k = sample.offsets[row.i]; k < sample.offsets[row.i + 1]; k++) if (sample.columns.sampled[k]) return sample.columns[name][k];
  return null;
}

/** All numbers of a token. */
function tokenAt(sample, k) {
  const found = {learner: sample.version, text: sample.pieces[sample.columns.token_ids[k]], id: sample.ids[sample.columns.token_ids[k]]};
  for (const [name, values] of Object.entries(sample.columns)) if (name !== "token_ids") found[name] = values[k] === null ? NaN : values[k];
  return found;
}

function fate(t) {
  if (!t.sampled) return "read";
  if (t.kept === undefined) return "kept";
  if (!t.kept) return "dropped";
  if (t.importance_weight === 0) return "none";
  if (t.clipped) return "clipped";
  return t.is_cut ? "cut" : Math.abs(t.importance_weight - 1) > 1e-6 ? "weighted" : "kept";
}

/** The colour behind a token: none at 0, full at the end of the scale; its strength grows with the logarithm. */
function shade(hue, t) {
  const {value, sides, ends, steps} = HUES[hue];
  const v = value(t);
  if (!t.sampled || !Number.isFinite(v)) return "";
  if (steps) return `rgba(${hexOf(v)}, 0.32)`;
  const strength = Math.min(1, Math.log1p(Math.abs(v) / ends[0]) / Math.log1p(ends[1] / ends[0]));
  return `rgba(${sides ? SIDES[v < 0 ? 0 : 1] : ONE_SIDE}, ${(0.75 * strength).toFixed(3)})`;
}
const hexOf = (version) => { const hex = colour(version); return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(", "); };

/** The tokens of a trajectory: what it read and what it said, in blocks; where it has several turns they have names. */
function fill(body, sample, hue) {
  const {sampled, turns} = sample.columns, start = sample.offsets[body.row.i], end = sample.offsets[body.row.i + 1];
  const blocks = [];
  for (let k = start; k < end; k++) {
    if (k === start || sampled[k] !== sampled[k - 1] || turns[k] !== turns[k - 1]) {
      const name = sampled[k] ? `turn ${turns[k]}` : k === start ? "prompt" : "read";
      blocks.push(el("div", {className: sampled[k] ? "said" : "heard"}, turns[end - 1] ? el("span", {className: "turn", "aria-hidden": "true"}, name) : null));
    }
    const t = tokenAt(sample, k), one = el("span", {className: "t"}, visible(t.text));
    if (hue === "fate") one.classList.add(fate(t));
    else one.style.backgroundColor = shade(hue, t);
    one.k = k;
    blocks.at(-1).append(one);
  }
  body.replaceChildren(...blocks);
}

/** The numbers of the token under the pointer, or of the one that arrow keys have come to. */
function pointAt(list, sample) {
  const tip = el("div", {className: "tip", role: "status", hidden: true});
  list.append(tip);
  const show = (one) => {
    const t = tokenAt(sample, one.k), of = (v) => (Number.isFinite(v) ? `${v.toFixed(4)}  (p = ${short(Math.exp(v))})` : "–");
    const lines = [`${JSON.stringify(visible(t.text))}, token ${t.id}`];
    if (!t.sampled) lines.push("read, not sampled");
    else {
      lines.push(`version ${t.versions}, staleness ${t.learner - t.versions}, turn ${t.turns}`, `log mu        ${of(t.behavior)}`);
      if (sample.columns.kept_set) lines.push(t.kept_set ? `drawn from ${t.kept_set} tokens, over which all policies are normalised` : "drawn from the whole vocabulary");
      if (sample.columns.at_sampling) lines.push(`at sampling   ${of(t.at_sampling)}`);
      if (sample.columns.target) lines.push(`log proximal  ${of(t.proximal)}`, `log theta     ${of(t.target)}`,
        `proximal/mu ${short(Math.exp(t.proximal - t.behavior))}, theta/proximal ${short(Math.exp(t.target - t.proximal))}`,
        `weight ${short(t.importance_weight)}, coefficient ${short(t.coefficient)}, advantage ${short(t.advantage)}, entropy ${short(t.entropy)}`,
        `${FATES[fate(t)]}${fate(t) === "dropped" ? ` by ${sample.labels[t.dropped_by - 1] ?? "?"}` : ""}`);
    }
    tip.textContent = lines.join("\n");
    tip.hidden = false;
    const {left, bottom, top} = one.getBoundingClientRect(), box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${bottom + box.height + 8 < innerHeight ? bottom + 6 : Math.max(4, top - box.height - 6)}px`;
  };
  const hide = () => { tip.hidden = true; list.querySelector(".here")?.classList.remove("here"); };
  list.addEventListener("mouseover", ({target}) => (target.k !== undefined ? show(target) : hide()));
  list.addEventListener("mouseleave", hide);
  list.addEventListener("focusout", hide);
  list.addEventListener("keydown", (event) => {
    const move = {ArrowRight: 1, ArrowLeft: -1}[event.key], body = event.target;
    if (event.key === "Escape") hide();
    if (!move || !body.row) return;
    event.preventDefault();
    const all = [...body.querySelectorAll(".t")], next = all[all.indexOf(body.querySelector(".here")) + move];
    if (!next) return;
    hide();
    next.classList.add("here");
    next.scrollIntoView({block: "nearest"});
    show(next);
  });
}

/** What the colours mean. */
function key(hue, sample) {
  const {title, sides, ends, unit, steps} = HUES[hue];
  if (hue === "fate") return el("div", {className: "legend key"}, Object.entries(FATES).map(([name, text]) => el("span", {}, el("span", {className: `t ${name}`}, "token"), ` ${text}`)));
  if (steps) {
    const versions = [...new Set(sample.columns.versions)].filter((v) => v >= 0).sort((a, b) => a - b);
    return el("div", {className: "legend key"}, versions.map((v) => el("span", {}, el("span", {className: "t", style: {backgroundColor: `rgba(${hexOf(v)}, 0.32)`}}, ` v${v} `), ` staleness ${sample.version - v}`)));
  }
  const values = [...(sides ? [-ends[1], -ends[0] * 4, 0] : [0]), ends[0] * 4, ends[1]];
  return el("div", {className: "legend key"}, el("span", {}, `${title}${unit ? `, ${unit}` : ""}:`), values.map((v) => {
    const strength = Math.min(1, Math.log1p(Math.abs(v) / ends[0]) / Math.log1p(ends[1] / ends[0]));
    return el("span", {className: "t", style: {backgroundColor: `rgba(${sides ? SIDES[v < 0 ? 0 : 1] : ONE_SIDE}, ${0.75 * strength})`}}, ` ${short(v)} `);
  }));
}

/** All groups of the batch, or questions of an evaluation: how their rewards lie, and which have no gradient. */
function batch(sample, rows, query, to, isTrained) {
  const what = isTrained ? "of the batch" : "of the evaluation";
  const kept = new Set(rows.map((row) => row.group)), degenerate = sample.groups.filter((group) => group.is_degenerate).length;
  const rewards = sample.groups.flatMap((group) => group.rewards.filter((reward) => reward !== null));
  const lowest = Math.min(...rewards, 0), width = (Math.max(...rewards, 1) - lowest) / 20 || 1;
  const bars = Array.from({length: 20}, () => []);
  for (const reward of rewards) bars[Math.min(19, Math.floor((reward - lowest) / width))].push(reward);
  const edge = (i) => Number((lowest + i * width).toPrecision(6));
  const histogram = chart(`Rewards ${what}`, {
    tooltip: tooltip(({dataIndex: i, value}) => `reward ${edge(i)} to ${edge(i + 1)}: ${value} answers`),
    xAxis: axis({type: "category", data: bars.map((_, i) => short(edge(i)))}), yAxis: axis({type: "value", minInterval: 1}),
    series: [{type: "bar", data: bars.map((those) => those.length), barCategoryGap: "8%", color: colour(0)}],
  }, {height: innerWidth > 820 ? 330 : 220, onClick: ({dataIndex: i}) => go({low: Math.min(...bars[i]), high: Math.max(...bars[i]), group: null}), label: `${rewards.length} rewards, as a histogram`});
  const dots = (group) => el("span", {className: "dots", title: group.rewards.map(short).join(", ")}, [...group.rewards].sort((a, b) => (b ?? -9) - (a ?? -9)).map((reward) =>
    el("i", {className: reward === null ? "no" : "", style: {height: reward === null ? "3px" : `${3 + 13 * Math.min(1, Math.max(0, (reward - lowest) / (20 * width)))}px`}})));
  const order = [...sample.groups].sort((a, b) => kept.has(b.group) - kept.has(a.group) || a.is_degenerate - b.is_degenerate || a.group - b.group);
  return el("div", {className: "grid"},
    el("figure", {className: "card"}, el("h3", {}, `Rewards ${what}`), histogram,
      el("figcaption", {}, "A click on a bar shows the trajectories with such a reward, of those that are kept.")),
    el("figure", {className: "card"}, el("h3", {}, `${isTrained ? "Groups" : "Questions"} ${what}`),
      isTrained ? el("p", {className: "soft number", id: "degenerate"}, `${degenerate} of ${sample.groups.length} groups have rewards all alike: no gradient.`) : null,
      el("div", {className: "scroll limited"}, table(["group", "rewards", "mean", "std", "tokens", "cut", ...(isTrained ? ["admitted at", ""] : ["prompt"])], order.map((group) => [
        kept.has(group.group) ? el("button", {className: "link", title: "Its trajectories", "aria-pressed": String(String(group.group) === query.group), onclick: () => to({group: group.group})}, group.group) : group.group,
        dots(group), short(group.mean), short(group.std), short(group.tokens.reduce((a, b) => a + b, 0) / Math.max(1, group.tokens.length)), group.cut, ...(isTrained ? [`v${group.admitted_version}`,
          [group.is_degenerate ? "no gradient" : "", group.failed ? `${group.failed} failed` : ""].filter(Boolean).join(", ")] : [visible(group.prompt_id)])])))));
}

function foundTable(found, most, to) {
  return section(`${found.length < most ? found.length : `The first ${most}`} answers with such words`, el("div", {className: "card scroll limited"}, table(["", "step", "group", "reward", "tokens", "question"], found.map((one) => [
    one.kind === "step" ? "training" : "held-out", el("button", {className: "link", onclick: () => to({kind: one.kind, step: one.step, group: one.group})}, one.step),
    one.group, short(one.reward), one.tokens, visible(one.question)]))));
}
