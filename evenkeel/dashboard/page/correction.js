// The correction: its bounds with a step's tokens among them, what it dropped and cut, and where the mismatch sits.
"use strict";

const RATIOS = {rho: "rho = proximal / behaviour", mismatch: "mismatch = at sampling / behaviour", staleness: "staleness = proximal / at sampling",
  r: "r = target / proximal", q: "q = target / behaviour", since_sampling: "since sampling = target / at sampling"};
const BECAME = {kept: ["--c0", "circle"], dropped: ["--c1", "triangle"], clipped: ["--c3", "diamond"], cut: ["--c4", "rect"]};

VIEWS.correction = async (root, query, start) => {
  const found = await get("correction", {run: query.run, step: query.step, from: query.from, to: query.to});
  const {kept, step, preset, is_replaced, bounds, tokens, units, by_turn, rejected, buckets, scatter, charts: curves} = found;
  root.append(...found.left_out.map((text) => el("p", {className: "refusal"}, text)));
  const known = Object.keys(RATIOS).filter((name) => !tokens || tokens[name]);
  const usual = bounds.find(({ratio, statistic}) => known.includes(ratio) && statistic === "ratio")?.ratio || "rho";
  const ratio = known.includes(query.ratio) ? query.ratio : usual, place = kept.indexOf(step);
  root.append(el("div", {className: "controls"},
    el("p", {}, "Correction: ", el("b", {}, preset), is_replaced ? " (this step's: config.yaml has another; an alarm or a resume has replaced one)" : null),
    el("button", {id: "earlier", disabled: place <= 0, onclick: () => go({step: kept[place - 1]})}, "← earlier"),
    el("label", {}, "Step", el("select", {id: "choose-step", onchange: ({target}) => go({step: target.value})},
      el("option", {value: "", selected: !query.step}, "the newest"), [...kept].reverse().map((one) => el("option", {value: String(one), selected: String(one) === query.step}, one)))),
    el("button", {id: "later", disabled: place < 0 || place >= kept.length - 1, onclick: () => go({step: kept[place + 1]})}, "later →"),
    el("label", {}, "Ratio", el("select", {id: "choose-ratio", onchange: ({target}) => go({ratio: target.value})},
      known.map((name) => el("option", {value: name, selected: name === ratio}, RATIOS[name]))))));

  const grid = el("div", {className: "grid"});
  if (tokens) {
    const of = bounds.filter((one) => one.ratio === ratio && one.statistic === "ratio");
    const marks = (those) => those.flatMap(({part, lower, upper}) => [["from", lower], ["to", upper]].filter(([, bound]) => bound).map(([, bound]) => ({yAxis: Math.log(bound), name: `${part}: ${short(bound)}`})));
    grid.append(acceptance(`Acceptance region: tokens of step ${step}`, Object.entries(BECAME).map(([name, [hue, symbol]]) => ({name, hue, symbol,
      data: tokens.mu.flatMap((mu, i) => (tokens.fate[i] === name && mu !== null && tokens[ratio][i] !== null ? [[mu, tokens[ratio][i]]] : []))})),
    marks(of.filter(({level}) => level === "token" || level === "maximum")), "log mu (nats)", `log ${ratio} (nats)`, "Each point is a trained token of the trajectories that are kept. Lines are the bounds of single tokens on this ratio; a clip takes the gradient only where the update would move on outwards.", "Acceptance region"));
    // One axis has room for one level: a bound on sums says nothing of means.
    const drawn = by_turn ? "turn" : of.some(({level}) => level === "geometric") ? "geometric" : "sequence";
    const coarse = of.filter(({level}) => level === drawn), mean = drawn === "geometric";
    const what = by_turn ? "turn" : "sequence";
    grid.append(acceptance(`${mean ? "Means" : "Sums"} over ${what}s of step ${step}`, [["kept", false], ["dropped", true]].map(([name, dropped]) => ({name, hue: BECAME[name][0], symbol: BECAME[name][1],
      data: units.tokens.flatMap((n, i) => (units.dropped[i] === dropped && units[ratio][i] !== null ? [[n, mean ? units[ratio][i] / n : units[ratio][i]]] : []))})),
    marks(coarse), "trained tokens", `${mean ? "mean" : "sum of"} log ${ratio} (nats)`,
    coarse.length ? `Each point is a ${what}; lines are the bounds of ${mean ? "means over" : "whole"} ${what}s.` : `Each point is a ${what}. The correction has no bound on whole ${what}s for this ratio.`, "Sequences"));
    const weights = tokens.weight.filter((weight) => weight !== null), edges = Array.from({length: 31}, (_, i) => -3 + i * 0.2), bars = Array(30).fill(0);
    for (const weight of weights) bars[Math.max(0, Math.min(29, Math.floor((Math.log2(Math.max(weight, 1e-9)) + 3) / 0.2)))] += 1;
    grid.append(el("figure", {className: "card"}, el("h3", {}, "Effective weights", el("span", {className: "soft unit"}, "of trained tokens")),
      chart("Effective weights", {
        tooltip: tooltip(({dataIndex: i, value}) => `weight ${short(2 ** edges[i])} to ${short(2 ** edges[i + 1])}: ${value} tokens`),
        xAxis: axis({type: "category", data: bars.map((_, i) => short(Number((2 ** (edges[i] + 0.1)).toPrecision(2))))}), yAxis: axis({type: "value", minInterval: 1}),
        series: [{type: "bar", data: bars, color: colour(0), barCategoryGap: "8%"}],
      }),
      el("figcaption", {}, `Importance weights of ${weights.length} tokens, ${weights.filter((weight) => weight === 0).length} of them 0; below 1/8 and above 8 in the outer bars.`)));
  } else root.append(el("p", {className: "soft"}, "No tokens of this step are kept (metrics.trajectories_per_step)."));
  for (const [of, title] of [["proximal", "Mismatch by probability under the learner"], ["behavior", "Mismatch by probability under the engine"]]) {
    if (buckets[of].rho_mean.some((value) => value !== null)) grid.append(bucketFigure(title, buckets.names, buckets[of]));
  }
  if (scatter) grid.append(distance(scatter));
  root.append(grid);

  root.append(el("div", {className: "grid below"},
    el("div", {className: "card"}, el("h3", {}, "Bounds"), bounds.length ? el("div", {className: "scroll", id: "bounds"}, table(["part", "of", "level", "from", "to"], bounds.map(({part, ratio: of, level, lower, upper, statistic}) =>
      [part, statistic === "ratio" ? of : `${statistic}${of ? ` of ${of}` : ""}`, level, short(lower), short(upper)]))) : el("p", {className: "soft"}, "It has none.")),
    el("div", {className: "card"}, el("h3", {}, "Dropped, by criterion and side"), rejected.length ? el("div", {className: "scroll", id: "rejected"},
      table(["criterion", "of the batch", "tokens shown: below 1", "above 1"], rejected.map(({label, share, below, above}) => [label, share === null ? "–" : percent(share), below ?? "–", above ?? "–"])))
      : el("p", {className: "soft"}, "No criterion has dropped a token of this step."))));
  root.append(section("Over the steps", curveGrid(curves, found.steps[1], query, "")));
};

/** Points and bounds. */
function acceptance(title, series, lines, x, y, caption, name) {
  const levels = [...new Set(lines.map(({yAxis}) => yAxis))];
  lines = levels.map((yAxis) => ({yAxis, name: lines.filter((one) => one.yAxis === yAxis).map(({name}) => name).join("; ")}));
  const near = lines.map(({yAxis}) => yAxis).filter((bound) => Math.abs(bound) < 3);  // one that is far from all points would press them together
  const ends = ({min, max}) => { const low = Math.min(min, ...near), high = Math.max(max, ...near), room = 0.08 * (high - low) + 0.02; return [low - room, high + room]; };
  return el("figure", {className: "card"}, el("h3", {}, title), legend(series.map((one) => ({label: one.name, colour: css(one.hue), box: true, last: String(one.data.length)}))),
    chart(name, {
      grid: {left: 30, right: 18, top: 14, bottom: 22, containLabel: true},
      tooltip: tooltip(({seriesName, value}) => `${seriesName}\n${x}: ${short(value[0])}\n${y}: ${short(value[1])}, ratio ${short(Math.exp(value[1]))}`),
      xAxis: axis({type: "value", scale: true, minInterval: x === "trained tokens" ? 1 : 0, name: x, nameLocation: "middle", nameGap: 24}), yAxis: axis({type: "value", scale: true, name: y, nameLocation: "middle", nameGap: 40,
        axisLabel: {color: css("--soft"), fontSize: 11, formatter: short, showMinLabel: false, showMaxLabel: false},
        min: (of) => ends(of)[0], max: (of) => ends(of)[1]}),
      series: series.map((one, i) => ({type: "scatter", name: one.name, data: one.data, symbol: one.symbol, symbolSize: 5, large: one.data.length > 3000, itemStyle: {color: css(one.hue), opacity: 0.6},
        markLine: i ? undefined : {silent: true, symbol: "none", lineStyle: {color: css("--ink"), type: "dashed", opacity: 0.6}, label: {color: css("--ink"), position: "insideEndTop", fontSize: 10, formatter: ({name: part}) => part}, data: lines}})),
    }, {height: 300, label: `${title}: ${series.map((one) => `${one.data.length} ${one.name}`).join(", ")}`}),
    el("figcaption", {}, caption));
}

/** Mean of rho with its standard deviation, and how many tokens, by probability. */
function bucketFigure(title, names, {tokens, rho_mean, rho_std}) {
  const bar = {type: "custom", name: "\u0000", silent: true, data: names.map((_, i) => [i, rho_mean[i], rho_std[i]]), renderItem: (params, api) => {
    const [i, mean, std] = [api.value(0), api.value(1), api.value(2)];
    if (!Number.isFinite(mean) || !Number.isFinite(std)) return null;
    const [x, low] = api.coord([i, mean - std]), [, high] = api.coord([i, mean + std]);
    return {type: "line", shape: {x1: x, y1: low, x2: x, y2: high}, style: {stroke: colour(1), lineWidth: 2}};
  }};
  const ends = rho_mean.flatMap((mean, i) => (mean === null ? [] : [mean - rho_std[i], mean + rho_std[i]]));
  return el("figure", {className: "card"}, el("h3", {}, title), legend([{label: "mean rho, one standard deviation", colour: colour(1)}, {label: "tokens", colour: colour(5), box: true}]),
    chart(title, {
      tooltip: tooltip(({dataIndex: i}) => `probability ${names[i]}\n${short(tokens[i])} tokens\nrho ${short(rho_mean[i])} ± ${short(rho_std[i])}`, {trigger: "item"}),
      xAxis: axis({type: "category", data: names}),
      yAxis: [axis({type: "value", min: Math.floor(20 * Math.min(...ends)) / 20, max: Math.ceil(20 * Math.max(...ends)) / 20, axisLabel: {color: css("--soft"), fontSize: 11, showMinLabel: false, showMaxLabel: false}}), axis({type: "log", min: 1, splitLine: {show: false}, axisLabel: {color: css("--soft"), fontSize: 11, formatter: short}})],
      series: [{type: "bar", name: "tokens", yAxisIndex: 1, data: tokens.map((n) => n || null), itemStyle: {color: colour(5), opacity: 0.35}, barCategoryGap: "30%"},
        {type: "scatter", name: "mean rho", data: rho_mean, itemStyle: {color: colour(1)}, symbolSize: 8}, bar],
    }),
    el("figcaption", {}, "Rare tokens carry most of the mismatch. Noise alone gives a mean a little above 1 under one policy's probability, and below 1 under the other's."));
}

/** How far apart both policies are, by log mu, of tokens of the recent steps. */
function distance({steps, fresh, older}) {
  const series = [["staleness 0", fresh, "--c0"], ["older", older, "--c1"]];
  return el("figure", {className: "card"}, el("h3", {}, "Distance of the learner from the engine"),
    legend(series.map(([label, {mu}, hue]) => ({label, colour: css(hue), box: true, last: String(mu.length)}))),
    chart("Distance", {
      grid: {left: 8, right: 14, top: 12, bottom: 22, containLabel: true},
      tooltip: tooltip(({seriesName, value}) => `${seriesName}\nlog mu ${short(value[0])}\n|log prox − log mu| ${short(value[1])}`),
      xAxis: axis({type: "value", scale: true, name: "log mu (nats)", nameLocation: "middle", nameGap: 24}),
      yAxis: axis({type: "log", axisLabel: {color: css("--soft"), fontSize: 11, formatter: (value) => value.toExponential(0)}}),
      series: series.map(([name, {mu, distance: y}, hue]) => ({type: "scatter", name, symbolSize: 4, itemStyle: {color: css(hue), opacity: 0.5}, data: mu.map((x, i) => [x, y[i]])})).reverse(),
    }, {height: 260}),
    el("figcaption", {}, `Trained tokens of steps ${steps[0]} to ${steps[1]}, drawn at random. What staleness 0 shows is mismatch of the engines; the rest is what newer weights changed.`));
}
