// Curves of all runs over their steps, with what happened on the same axis; below, each run in words.
"use strict";

VIEWS.overview = async (root, query, start) => {
  const runs = await Promise.all(start.runs.map((_, run) => get("overview", {run, from: query.from, to: query.to, more: query.more})));
  const several = runs.length > 1;
  const {steps, zoom, onZoom} = overSteps(Math.max(...runs.map((run) => run.steps[1])), query);

  // In words, at the top.
  for (const [i, run] of runs.entries()) {
    const tiles = [...(run.headline ? [["held-out accuracy before", run.headline.before], ["held-out accuracy after", run.headline.after],
      ["gain", run.headline.gain]] : []), ...run.tiles.map(({label, value}) => [label, value])];
    root.append(el("p", {}, several ? el("b", {style: {color: colour(i)}}, `${start.runs[i].name} `) : null, run.status,
      el("span", {className: "soft"}, ` ${start.runs[i].path}`)));
    if (run.left_out.length) root.append(...run.left_out.map((text) => el("p", {className: "refusal"}, text)));
    root.append(el("div", {className: "tiles"}, tiles.map(([label, value]) => tile(label, value))));
  }

  // What happened, on the axis of the steps.
  const kinds = {error: ["--error", "path://M0,0L10,10M10,0L0,10"], alarm: ["--alarm", "triangle"], warning: ["--warning", "diamond"],
    watch: ["--watch", "circle"], saved: ["--c2", "rect"], resumed: ["--c0", "arrow"], ending: ["--c6", "pin"], stopped: ["--c6", "pin"]};
  const marks = runs.flatMap((run, i) => run.marks.map((mark) => ({...mark, run: i})));
  const present = Object.keys(kinds).filter((kind) => marks.some((mark) => mark.kind === kind)).reverse();
  const alarms = marks.filter(({kind}) => kind === "watch" || kind === "alarm");
  const lines = {silent: true, symbol: "none", label: {show: false}, data: alarms.map(({step, kind}) => ({xAxis: step,
    lineStyle: {color: css(`--${kind}`), type: kind === "alarm" ? "dashed" : "dotted", width: 1.2}}))};
  root.append(el("figure", {className: "card wide"}, el("h3", {}, "What happened"),
    chart("What happened", {
      group: "steps",
      grid: {left: 8, right: 14, top: 6, bottom: 34, containLabel: true},
      tooltip: tooltip(({data}) => `${several ? `${start.runs[data.mark.run].name}, ` : ""}step ${short(data.mark.step)}, ${data.mark.time}\n${data.mark.kind}: ${visible(data.mark.text)}`),
      xAxis: steps(),
      yAxis: axis({type: "category", data: present.length ? present : ["nothing yet"]}),
      dataZoom: [zoom, {type: "slider", filterMode: "none", height: 18, bottom: 4, borderColor: css("--line"), brushSelect: true, showDataShadow: false,
        labelFormatter: (value) => String(Math.round(value)), textStyle: {color: css("--soft")}}],
      series: [{type: "scatter", symbolSize: 11, data: marks.map((mark) => ({value: [mark.step, mark.kind], mark, symbol: kinds[mark.kind][1],
        itemStyle: {color: css(kinds[mark.kind][0]), borderColor: css(kinds[mark.kind][0]), borderWidth: mark.kind === "error" ? 2 : 0}}))}],
    }, {height: 74 + 18 * Math.max(1, present.length), onZoom, label: `What happened: ${marks.length} events over the steps`}),
    el("figcaption", {}, "Drag the slider, or hold Ctrl and turn the wheel, to look at a part of the steps; all charts follow. ",
      "An event that names no step stands where its time is between those that do. Watches and alarms are lines in the charts.")));

  // Curves.
  const grid = el("div", {className: "grid"});
  const accuracy = runs.map((run, i) => ({...run.accuracy, i})).filter((one) => one.accuracy.length);
  if (accuracy.length) grid.append(accuracyChart(accuracy, {steps, zoom, lines, start, several}));
  const title = ({title}) => title;
  for (const name of new Set(runs.flatMap((run) => run.charts.map(title)))) grid.append(curveFigure(name, runs.map((run) => run.charts.find((one) => one.title === name)),
    {names: start.runs.map(({name}) => name), steps, zoom, lines, onZoom, more: name.startsWith("k3 KL") ? runs[0].usual : null}));
  for (const [i, run] of runs.entries()) if (run.staleness) grid.append(stalenessChart(run.staleness, {steps, zoom, lines, name: several ? start.runs[i].name : ""}));
  root.append(section("Curves", el("p", {className: "soft"}, "Faint lines are single steps, strong ones running means; numbers in the legends are the newest that there are."),
    moreMetrics(runs, query), grid));
  for (const [i, run] of runs.entries()) root.append(...words(run, several ? `${start.runs[i].name}: ` : "", i));
};

function accuracyChart(found, {steps, zoom, lines, start, several}) {
  const series = found.flatMap(({accuracy, pass, k, tasks, i}) => [["held-out accuracy", accuracy, several ? i : 0, false],
    ...(pass.length ? [[`pass@${k}`, pass, several ? i : 1, true]] : []),
    ...tasks.map(([name, rows], n) => [name, rows, several ? i : n + 2, true])].map(([label, rows, hue, dashed]) => ({
    label: several ? `${start.runs[i].name}: ${label}` : label, rows, colour: colour(hue), dashed, last: rows.at(-1)[1].toFixed(3)})));
  // The 95 % interval of each evaluation, as a bar with ends.
  const bar = (line) => ({type: "custom", name: `${line.label}\u0000`, data: line.rows, encode: {x: 0, y: [2, 3]}, silent: true, renderItem: (_, api) => {
    const [x, low] = api.coord([api.value(0), api.value(2)]), [, high] = api.coord([api.value(0), api.value(3)]);
    const stroke = {stroke: line.colour, lineWidth: 1.4, opacity: 0.75};
    const part = (x1, y1, x2, y2) => ({type: "line", shape: {x1, y1, x2, y2}, style: stroke});
    return {type: "group", children: [part(x, low, x, high), part(x - 4, low, x + 4, low), part(x - 4, high, x + 4, high)]};
  }});
  return el("figure", {className: "card"}, el("h3", {}, "Held-out accuracy"), legend(series), chart("Held-out accuracy", {
    group: "steps",
    tooltip: tooltip((items) => [`step ${items[0].value[0]}`, ...items.filter(({seriesName}) => !seriesName.endsWith("\u0000")).map(({seriesName, value}) =>
      `${seriesName}: ${value[1].toFixed(3)} [${value[2].toFixed(3)}, ${value[3].toFixed(3)}]`)].join("\n"), {trigger: "axis"}),
    xAxis: steps(), yAxis: axis({type: "value", min: 0, max: 1}), dataZoom: [zoom],
    series: series.flatMap((line, k) => [{type: "line", name: line.label, data: line.rows, encode: {x: 0, y: 1}, color: line.colour, symbol: "circle", symbolSize: 6,
      showSymbol: line.rows.length < 100, lineStyle: {width: 2, type: line.dashed ? "dashed" : "solid"}, markLine: k ? undefined : lines}, bar(line)]),
  }, {label: `Held-out accuracy over steps; last: ${series.map(({label, last}) => `${label} ${last}`).join(", ")}`}),
  el("figcaption", {}, "Questions that training never sees. Bars are 95 % Wilson intervals; points whose intervals overlap may be equal.",
    found.some(({pass}) => pass.length) ? " pass@k: at least one of k answers is right. Questions are the unit of the intervals, not answers." : null));
}

function stalenessChart({x, ages, shares}, {steps, zoom, lines, name}) {
  const title = name ? `Staleness: ${name}` : "Staleness";
  return el("figure", {className: "card"}, el("h3", {}, title),
    legend(ages.map((age, i) => ({label: `staleness ${age}`, colour: colour(i), box: true, last: percent(shares[i].at(-1))}))),
    chart(title, {
      group: "steps",
      tooltip: tooltip((items) => [`step ${items[0].value[0]}`, ...items.map(({seriesName, value}) => `staleness ${seriesName}: ${percent(value[1])}`)].join("\n"), {trigger: "axis"}),
      xAxis: steps(), yAxis: axis({type: "value", min: 0, max: 1, axisLabel: {formatter: percent, color: css("--soft"), fontSize: 11}}), dataZoom: [zoom],
      series: ages.map((age, i) => ({type: "line", step: "middle", name: age, stack: "all", data: x.map((step, k) => [step, shares[i][k]]), showSymbol: false, color: colour(i),
        lineStyle: {width: 0}, areaStyle: {opacity: 0.75}, markLine: i ? undefined : lines})),
    }),
    el("figcaption", {}, "Share of trained tokens by the versions between sampling a token and training on it. Nothing may be older than max_staleness; ",
      "a run that is always at that bound is one in which rollouts are far ahead of the learner."));
}

/** A box in which any other metric is asked for. */
function moreMetrics(runs, query) {
  const names = [...new Set(runs.flatMap((run) => run.names))].sort();
  if (frozen || !names.length) return null;
  const chosen = (query.more || "").split(",").filter(Boolean);
  return el("div", {className: "controls"},
    el("label", {}, "Add a metric", el("input", {id: "more", type: "search", placeholder: `one of ${names.length}`, size: 34, "list": "names", onchange: ({target}) => {
      if (names.includes(target.value)) go({more: [...chosen, target.value].join(",")});
    }})),
    el("datalist", {id: "names"}, names.map((name) => el("option", {value: name}))),
    chosen.map((name) => el("button", {title: "Take it away", onclick: () => go({more: chosen.filter((one) => one !== name).join(",")})}, `${name} ×`)));
}

/** A run in words. */
function words(run, name, number) {
  const rows = (entries, level) => entries.map((one) => ({when: one.time || `step ${one.step}`, level: one.state || one.level || level, text: one.text})).reverse();
  const cut = (kind, file) => run.counts[kind] > run[kind].length ? el("p", {className: "soft"}, `The last ${run[kind].length}; all ${run.counts[kind]} are in ${file}.`) : null;
  return [
    section(`${name}Summary`, el("dl", {className: "card facts"}, run.summary.map(([what, value]) => el("div", {}, el("dt", {}, what), el("dd", {}, value))))),
    run.workers.length ? section(`${name}Rollout workers`, el("div", {className: "card"}, table(["worker", "steps", "groups", "tokens", "waits, mean"], run.workers))) : null,
    section(`${name}Early warning`, cut("warnings", "monitor.jsonl"),
      el("div", {className: "card"}, log(rows(run.warnings), "Nothing that the monitor follows has grown against the run's own start."))),
    section(`${name}Warnings and errors`, cut("notable", "events.log"), el("div", {className: "card"}, log(rows(run.notable), "None."))),
    run.clipped.length ? section(`${name}Tokens that the trust region stopped`, el("div", {className: "card"},
      table([], run.clipped.map(([which, tokens]) => [which, visible(tokens)])))) : null,
    run.slowest.length ? section(`${name}Slowest prompts`, el("div", {className: "card"},
      table(["prompt", "rewards", "answers", "tokens", "without a reward", "worker"], run.slowest.map((row) => row.map(visible))))) : null,
    section(`${name}Settings`, el("details", {id: `settings-${number}`, className: "card"}, el("summary", {}, "Resolved configuration"), el("pre", {}, visible(run.config, true)))),
    section(`${name}Events`, cut("events", "events.log"), el("details", {id: `events-${number}`, className: "card"}, el("summary", {}, `${run.counts.events} events, the last first`), log(rows(run.events), "None."))),
  ].filter(Boolean);
}
