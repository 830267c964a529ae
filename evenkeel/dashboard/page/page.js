// What all views share: getting data, elements, charts. Whatever comes from a run becomes text, never markup.
"use strict";

/** Views by name: async (root, query, start) => nothing, which fills `root`; one with `isStill(query)` isn't drawn anew when the run has written.
 * Their files put them here. */
const VIEWS = {};
const frozen = document.getElementById("frozen") && JSON.parse(document.getElementById("frozen").textContent);

/** Data of a view; throws the server's sentence. */
async function get(name, query = {}) {
  let given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "").sort();
  if (frozen) given = given.filter(([name, value]) => (name === "step" || name === "kind") && value !== "step");
  const key = given.length ? `${name}?${new URLSearchParams(given)}` : name;
  if (frozen) {
    const found = frozen[frozen[key]?.same_as ?? key] || {error: "This page is frozen, and holds no more of that; evenkeel dashboard shows all of the run."};
    if (found.error) throw new Error(found.error);
    return found;
  }
  const answer = await fetch(`data/${key}`);
  const found = await answer.json().catch(() => ({error: `${answer.status} ${answer.statusText}`}));
  if (!answer.ok) throw new Error(found.error);
  return found;
}

/** An element. Properties are the element's own, `data-...` and `aria-...` attributes; children are elements or text. */
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") Object.assign(made.style, value);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function table(head, rows, right = []) {
  const cell = (tag, value, i) => el(tag, {className: right.includes(i) ? "right" : ""}, value instanceof Node ? value : String(value ?? ""));
  return el("div", {className: "scroll"}, el("table", {},
    head.length ? el("thead", {}, el("tr", {}, head.map((value, i) => cell("th", value, i)))) : null,
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, i) => cell("td", value, i)))))));
}

/** A number that one looks at first; its unit, or what stands in brackets after it, is smaller. */
function tile(label, text, style) {
  const [, value, rest] = /^([-+\d.,e%]+)( .*)$/.exec(text) || [null, text];
  return el("div", {className: "tile", style}, el("span", {}, label), el("div", {}, el("b", {}, value), rest ? [" ", el("small", {}, rest.trim())] : null));
}

function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), children);
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (i) => css(`--c${i % 7}`);

/** Black or white, whichever is read better on a colour (WCAG's contrast). */
function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

const whole = new Intl.NumberFormat("en");

/** A number of any size, short. */
function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return whole.format(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
const percent = (value) => `${Number((100 * value).toPrecision(3))}%`;

/** What a model wrote, with control, format and bidirectional characters made visible: they could hide or reorder what stands around.
 * `plain`: ends of lines are no news. */
function visible(text, plain = false) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}]/gu, (one) => {
    if (one === "\n") return plain ? one : "\u21b5\n";
    if (one === "\t") return "\u21e5\t";
    return `\u27e8U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

// Charts live as long as their view is shown: a redraw puts them, with what the user has zoomed to, into the new elements. One is drawn when
// it comes near to what is seen, and then each time that it is made anew.
const charts = new Map();
const resizes = new ResizeObserver((entries) => entries.forEach(({target}) => echarts.getInstanceByDom(target)?.resize()));
const sight = new IntersectionObserver((entries) => entries.forEach(({target, isIntersecting, boundingClientRect: {top, bottom}}) => {
  target.chart.isNear = isIntersecting;
  if (!isIntersecting) return;
  if (top < innerHeight && bottom > 0) draw(target.chart);
  else setTimeout(draw, 200, target.chart);  // what is seen comes first
}), {rootMargin: "300px"});

/** The element of a chart, made at its first use; drawn anew with this option. */
function chart(name, option, {height, label, onClick, onZoom} = {}) {
  let one = charts.get(name);
  if (!one) {
    const box = el("div", {className: "chart", role: "img", tabIndex: -1});
    box.style.height = height ? `${height}px` : "";
    one = box.chart = {box, drawn: null};
    charts.set(name, one);
    resizes.observe(box);
    sight.observe(box);
  }
  one.box.setAttribute("aria-label", label || name);
  Object.assign(one, {option, onClick, onZoom});
  requestAnimationFrame(() => { if (one.isNear) draw(one); });
  return one.box;
}

function draw(one) {
  const {box, option} = one;
  if (!option || !box.isConnected) return;
  if (!one.drawn) {
    one.drawn = echarts.init(box);
    if (one.onClick) one.drawn.on("click", (event) => one.onClick(event));
    if (one.onZoom) one.drawn.on("datazoom", () => one.onZoom(one.drawn));
  }
  one.drawn.setOption({...common(), ...option}, {replaceMerge: ["series"]});
  if (option.group) { one.drawn.group = option.group; echarts.connect(option.group); }
  if (one.drawn.getWidth() !== box.clientWidth || one.drawn.getHeight() !== box.clientHeight) one.drawn.resize();  // which draws it once more
  one.option = null;
}
addEventListener("beforeprint", () => charts.forEach(draw));

function dropCharts() {
  for (const {box, drawn} of charts.values()) { resizes.unobserve(box); sight.unobserve(box); drawn?.dispose(); }
  charts.clear();
}

const common = () => ({
  animation: false,
  backgroundColor: "transparent",
  textStyle: {color: css("--soft"), fontFamily: getComputedStyle(document.body).fontFamily},
  grid: {left: 8, right: 14, top: 12, bottom: 6, containLabel: true},
});
const axis = (more = {}) => ({
  axisLine: {show: false}, axisTick: {show: false}, nameTextStyle: {color: css("--soft")},
  axisLabel: {color: css("--soft"), hideOverlap: true, fontSize: 11}, splitLine: {lineStyle: {color: css("--line")}}, ...more,
});
/** Drawn on the canvas: no markup is made of what it says. */
const tooltip = (formatter, more = {}) => ({
  renderMode: "richText", confine: true, backgroundColor: css("--card"), borderColor: css("--line"),
  textStyle: {color: css("--ink"), fontSize: 12, width: 360, overflow: "break"}, formatter, ...more,
});

function legend(entries) {
  return el("div", {className: "legend"}, entries.map(({label, colour, dashed, box, last}) => el("span", {},
    el("i", {className: `swatch ${dashed ? "dashed" : ""} ${box ? "box" : ""}`, style: box ? {backgroundColor: colour} : {borderTopColor: colour}}),
    label, last !== undefined && last !== null ? el("b", {}, last) : null)));
}

function log(entries, empty) {
  if (!entries.length) return el("p", {className: "soft"}, empty);
  return el("ul", {className: "log"}, entries.map(({when, level, text}) => el("li", {className: level},
    el("time", {}, when), level !== "info" ? el("b", {}, level) : null, visible(text))));
}
