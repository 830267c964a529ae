// Lanes of what each process did when; who waited for whom, and the way of one group.
"use strict";

// What the colours stand for, and which spans are of that kind; waits have none.
const DEEDS = [["sampling", "--c0", "sample"], ["rewards and tools", "--c3", "reward", "tool"], ["training", "--c2", "step", "forward", "copy"],
  ["weights on their way", "--c1", "publish", "fetch", "update"], ["making and explaining batches", "--c5", "queue", "pull", "pack", "correct", "diagnose", "compare"],
  ["evaluation", "--c4", "evaluate"], ["start, save, end", "--c6", "start", "save", "restore", "settle", "end"], ["waits", "--line", "wait", "slot"]];
const OTHER = ["other", "--c6"];
const ROWS = 4;  // of a lane; what doesn't find room in them is counted in one more

VIEWS.timeline = async (root, query, start) => {
  const {lanes, whole, part, spans, merged_s, busy, queued, left_out} = await get("timeline", {run: query.run, begin: query.begin, end: query.end, group: query.group});
  root.append(...left_out.map((text) => el("p", {className: "refusal"}, text)));
  if (!whole) {
    root.append(el("p", {className: "soft"}, "There is no timeline yet. A run writes timeline.jsonl from its start on."));
    return;
  }
  const group = query.group === undefined ? null : Number(query.group);
  const since = (time, digits = 2) => { const s = Math.round((time - whole[0]) * 10 ** digits) / 10 ** digits; return s < 60 ? `${s.toFixed(digits)} s` : `${Math.floor(s / 60)}:${(s % 60).toFixed(digits).padStart(digits ? 3 + digits : 2, "0")}`; };
  const length = part[1] - part[0], at = (time) => time - whole[0];  // the axis has seconds since the beginning: round ones get a label
  const to = (begin, end) => go({begin: begin.toFixed(3), end: end.toFixed(3)});
  const move = (by) => to(part[0] + by * length, part[1] + by * length);
  const scale = (by) => to(part[0] - (by - 1) / 2 * length, part[1] + (by - 1) / 2 * length);
  const steps = {ArrowLeft: () => move(-0.4), ArrowRight: () => move(0.4), "+": () => scale(0.5), "-": () => scale(2)};
  const button = (id, text, does, label) => el("button", {id, onclick: does, "aria-label": label}, text);

  root.append(el("div", {className: "controls"},
    frozen ? null : [button("earlier", "←", steps.ArrowLeft, "Earlier"), button("later", "→", steps.ArrowRight, "Later"),
    button("closer", "+", steps["+"], "Closer"), button("wider", "−", steps["-"], "Wider"),
    button("whole", "whole run", () => to(...whole)), button("newest", "newest", () => go({begin: null, end: null, group: null}))],
    frozen && merged_s ? null : el("label", {}, "Follow a group", el("input", {id: "group", type: "number", min: 0, value: query.group ?? "", onchange: ({target}) => go({group: target.value, begin: null, end: null})})),
    el("span", {className: "soft number", id: "part"}, `${since(part[0])} to ${since(part[1])} of ${since(whole[1], 0)}`,
      merged_s ? `; spans of one kind that are less than ${short(merged_s)} s apart are one` : null)));

  // The group's own spans, and the steps of the version whose batch it was in, which the span of its wait in the book says.
  const trained = group === null ? undefined : spans.find((span) => span.group === group && span.what === "queue")?.version;
  const isOwn = (span) => span.group === group || (span.what === "step" && trained !== undefined && span.version === trained);

  // Spans that overlap in a lane lie in rows below each other; where a group is followed, the first row is its own.
  const rows = Object.fromEntries(lanes.map((lane) => [lane, group !== null && spans.some((span) => span.lane === lane && isOwn(span)) ? [Infinity] : []]));
  const last = {}, more = {}, drawn = [];
  for (const span of spans) {
    const ends = rows[span.lane], free = group !== null && isOwn(span) ? 0 : ends.findIndex((end) => end <= span.begin + 1e-9);
    span.row = free < 0 ? Math.min(ends.length, ROWS) : free;
    if (span.row === ROWS) {  // no room: one of many
      const those = more[span.lane];
      if (those && those.end >= span.begin) Object.assign(those, {end: Math.max(those.end, span.end), count: those.count + span.count});
      else drawn.push(more[span.lane] = {...span, what: "more", why: null, version: null, group: null, is_more: true});
      ends[ROWS] = Infinity;
      continue;
    }
    if (ends[span.row] !== Infinity) ends[span.row] = span.end;
    drawn.push(span);
  }
  // A name has room up to the next span of its row.
  for (const span of drawn) {
    const before = last[`${span.lane} ${span.row}`];
    if (before) before.room = span.begin;
    last[`${span.lane} ${span.row}`] = span;
  }
  const deed = (what) => DEEDS.find(([, , ...those]) => those.includes(what)) || OTHER;
  const present = [...DEEDS, OTHER].filter((one) => spans.some(({what}) => deed(what) === one));
  const name = ({what, why, count, version, group: of, is_more}) => is_more ? `${count} more` : [what === "wait" ? `waits for ${why || "?"}` : what, what !== "wait" && why ? `(${why})` : "", count > 1 ? `${count} times` : "",
    version === null ? "" : `v${version}`, of === null ? "" : `group ${of}`].filter(Boolean).join(" ");
  const heights = lanes.map((lane) => 12 + 14 * Math.max(1, rows[lane].length)), total = heights.reduce((a, b) => a + b, 0);
  const tops = heights.map((_, i) => heights.slice(0, i).reduce((a, b) => a + b, 0));
  const followed = (span) => group === null || isOwn(span);
  const narrow = innerWidth < 560, left = narrow ? 64 : 96;

  const picture = chart("Timeline", {
    grid: {left, right: 14, top: 4, bottom: 62},
    tooltip: tooltip(({data}) => data.span ? `${data.span.lane}: ${name(data.span)}\n${since(data.span.begin, 3)} to ${since(data.span.end, 3)}, ${short(data.span.end - data.span.begin)} s` : ""),
    xAxis: axis({type: "value", min: Math.min(0, at(part[0])), max: Math.max(at(whole[1]), at(part[1])), axisLabel: {color: css("--soft"), fontSize: 11, hideOverlap: true, showMinLabel: false, showMaxLabel: false, formatter: (time) => since(whole[0] + time, length < 20 ? 1 : 0)}}),
    yAxis: {type: "value", min: 0, max: total, inverse: true, show: false},
    dataZoom: [{type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, startValue: at(part[0]), endValue: at(part[1])},
      {type: "slider", filterMode: "none", height: 18, bottom: 6, borderColor: css("--line"), showDetail: false, startValue: at(part[0]), endValue: at(part[1])}],
    series: [
      {type: "custom", silent: true, data: lanes.map((lane, i) => ({value: [at(part[0]), tops[i]]})), renderItem: (params, api) => {
        const i = params.dataIndex, box = params.coordSys, [, top] = api.coord([at(part[0]), tops[i]]), [, bottom] = api.coord([at(part[0]), tops[i] + heights[i]]);
        return {type: "group", children: [
          {type: "rect", shape: {x: box.x, y: top, width: box.width, height: bottom - top}, style: {fill: i % 2 ? "transparent" : css("--hover")}},
          {type: "text", style: {x: box.x - 8, y: (top + bottom) / 2, text: lanes[i], textAlign: "right", textVerticalAlign: "middle", fill: css("--ink"), fontSize: narrow ? 10 : 12}}]};
      }},
      {type: "custom", name: "spans", encode: {x: [0, 1], y: 2}, data: drawn.map((span) => ({value: [at(span.begin), at(span.end), tops[lanes.indexOf(span.lane)]], span})), renderItem: (params, api) => {
        const span = drawn[params.dataIndex], i = lanes.indexOf(span.lane), [x, y] = api.coord([at(span.begin), tops[i] + 6 + 14 * span.row]), [end] = api.coord([at(span.end), 0]);
        const box = params.coordSys, from = Math.max(x, box.x), upto = Math.min(Math.max(end, x + 1), box.x + box.width);
        if (upto <= from) return null;
        const fill = css(span.is_more ? "--hover" : deed(span.what)[1]), room = Math.min(upto, span.room === undefined ? upto : api.coord([at(span.room), 0])[0]) - from;
        const said = (span.is_more ? [name(span), `+${span.count}`] : span.group === null ? [span.what] : [`${span.what} ${span.group}`, String(span.group)]).find((text) => room > 8 + 6 * text.length);
        return {type: "rect", shape: {x: from, y, width: upto - from, height: 12, r: 1.5}, style: {fill, stroke: span.is_more ? css("--c6") : undefined, lineWidth: 0.5, opacity: followed(span) ? 1 : 0.18},
          ...(said && followed(span) ? {textContent: {style: {text: said, fontSize: 10, fill: inkOn(fill)}}, textConfig: {position: "insideLeft", distance: 3}} : {})};
      }}],
  }, {
    height: total + 70,
    label: `Timeline of ${lanes.join(", ")}; ${spans.length} spans`,
    onClick: ({data}) => { if (data?.span && data.span.group !== null) go({group: data.span.group, begin: null, end: null}); },
    onZoom: (drawn) => {
      const {startValue, endValue} = drawn.getOption().dataZoom[0];
      clearTimeout(VIEWS.timeline.waiting);
      const [begin, end] = [whole[0] + startValue, whole[0] + endValue];
      if (!frozen && (Math.abs(begin - part[0]) > 1e-4 * length || Math.abs(end - part[1]) > 1e-4 * length)) VIEWS.timeline.waiting = setTimeout(() => to(begin, end), 400);
    },
  });
  picture.tabIndex = 0;
  picture.onkeydown = (event) => { if (steps[event.key]) { event.preventDefault(); steps[event.key](); } };
  root.append(el("figure", {className: "card"}, el("h3", {}, "Who did what, and who waited"),
    legend(present.map(([label, hue]) => ({label, colour: css(hue), box: true}))), picture,
    el("figcaption", {}, "Where a lane is empty nothing is known. Drag to move, hold Ctrl and turn the wheel for closer and wider (or the keys ← → + −); a click on a span of a group follows the group.")));

  const share = (value) => (value > 0 && value < 0.001 ? "< 0.1%" : percent(value));
  const own = spans.filter((span) => group !== null && isOwn(span));
  if (group !== null) root.append(section(`Group ${group}, from its admission to its step`, own.length ? el("div", {className: "card", id: "followed"},
    table(["from", "to", "seconds", "lane", "what", "version"], own.map((span) => [since(span.begin), since(span.end), (span.end - span.begin).toFixed(3), span.lane,
      span.what + (span.why ? ` (${visible(span.why)})` : ""), span.version ?? ""]), [0, 1, 2]),
    el("p", {}, el("button", {id: "its-tokens", onclick: () => go({step: trained === undefined ? null : trained + 1}, "tokens")}, "tokens of its step"))) : el("p", {className: "soft"}, "No span of this group is in the timeline.")));
  root.append(section("Shares of the part that is shown", el("div", {className: "card", id: "shares"}, table(["lane", "", "does something", "waits", "unknown"], busy.map((row) => [row.lane,
    el("span", {className: "share", "aria-hidden": "true"}, [["busy", "--c0"], ["waits", "--c4"]].map(([kind, hue]) => el("i", {style: {width: `${160 * row[kind]}px`, background: css(hue)}}))),
    share(row.busy), share(row.waits), share(row.unknown)])),
    queued ? el("p", {className: "soft number", id: "queued"}, `${short(queued.groups)} finished groups waited in the book for their batch, ${short(queued.seconds)} s each in the mean, ${short(queued.at_a_time)} at a time.`) : null)));
};
VIEWS.timeline.isStill = (query) => Boolean(query.begin || query.group);
