// Curves over steps, of one run or several in one chart.
"use strict";

/** What charts over steps share: the axis, the part of it that is shown, and what a change of that part does. */
function overSteps(last, query) {
  const range = [0, Math.max(1, last)];
  let waiting = null;
  return {
    steps: () => axis({type: "value", min: range[0], max: range[1], minInterval: 1, splitLine: {show: false}}),
    zoom: {type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, startValue: query.from, endValue: query.to},
    onZoom: (drawn) => {  // a part of the steps has points of its own
      const {startValue, endValue} = drawn.getOption().dataZoom[0];
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        const whole = startValue <= range[0] && endValue >= range[1];
        go({from: whole ? null : Math.floor(startValue), to: whole ? null : Math.ceil(endValue)});
      }, 400);
    },
  };
}

/** A chart of the curves of one title. `found`: what each run has of it, or nothing; `names`: of the runs; `lines`: marks at steps. */
function curveFigure(title, found, {names, steps, zoom, onZoom, lines, more}) {
  const {unit, caption, is_logarithmic, is_share, is_count} = found.find(Boolean), several = names.length > 1;
  const series = found.flatMap((one, i) => (one ? one.series : []).map((line, j) => ({...line, colour: colour(several ? i : j), dashed: several && j > 0,
    label: several ? `${names[i]}: ${line.label}` : line.label})));
  const points = ({x}, y) => x.map((step, k) => [step, y[k]]);
  return el("figure", {className: "card"}, el("h3", {}, title, unit ? el("span", {className: "soft unit"}, unit) : null), legend(series),
    chart(title, {
      group: "steps",
      tooltip: tooltip((items) => [`step ${items[0].value[0]}`, ...items.filter(({seriesName}) => !seriesName.endsWith("\u0000")).map(({seriesName, value}) =>
        `${seriesName}: ${is_share ? percent(value[1]) : short(value[1])}`)].join("\n"), {trigger: "axis"}),
      xAxis: steps(),
      yAxis: axis({type: is_logarithmic ? "log" : "value", scale: !is_share && !is_count, minInterval: is_count ? 1 : 0, max: is_share ? ({max}) => (max < 0.05 ? 0.05 : null) : null, axisLabel: {color: css("--soft"), fontSize: 11,
        formatter: is_logarithmic ? (value) => value.toExponential(0) : is_share ? percent : short}}),
      dataZoom: [zoom],
      series: series.flatMap((line, k) => [
        {type: "line", name: line.label, data: points(line, line.y), showSymbol: line.x.length < 3, symbolSize: 5, color: line.colour,
          lineStyle: {width: line.smooth ? 1 : 2, opacity: line.smooth ? 0.35 : 1, type: line.dashed ? "dashed" : "solid"}, markLine: k ? undefined : lines},
        ...(line.smooth ? [{type: "line", name: `${line.label}\u0000`, data: points(line, line.smooth), showSymbol: false, color: line.colour,
          lineStyle: {width: 2, type: line.dashed ? "dashed" : "solid"}}] : [])]),
    }, {onZoom, label: `${title} over steps; last: ${series.map(({label, last}) => `${label} ${last}`).join(", ")}`}),
    el("figcaption", {}, caption, more ? ` ${more}` : null));
}

/** All charts of a view, side by side. */
function curveGrid(charts, last, query, name) {
  const shared = overSteps(last, query);
  return el("div", {className: "grid"}, charts.map((one) => curveFigure(one.title, [one], {names: [name], ...shared})));
}
