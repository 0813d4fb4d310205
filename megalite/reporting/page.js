"use strict";
// Hovering over a chart tells each curve's nearest point, and marks the same place in all charts.
const tip = document.getElementById("tip");
const charts = [...document.querySelectorAll("svg.chart")].map((svg) => ({
  svg,
  axes: JSON.parse(svg.dataset.axes), // [x low, high, pixels; y low, high, pixels; y is logarithmic]
  data: JSON.parse(svg.closest("figure").querySelector("script").textContent),
  cursor: svg.querySelector(".cursor"),
}));

const placeX = ([low, high, start, end], x) => start + ((x - low) / (high - low)) * (end - start);
function placeY([, , , , low, high, start, end, log], y) {
  const share = log ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
  return start + Math.min(Math.max(share, 0), 1) * (end - start);
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// A curve that has ended, or has not begun, has nothing to tell there.
function points({ data, axes }, x) {
  const room = (axes[1] - axes[0]) / 100;
  return data.curves.map((curve) => ({ curve, at: curve.x.length ? nearest(curve.x, x) : -1 }))
    .filter(({ curve, at }) => at >= 0 && x >= curve.x[0] - room && x <= curve.x.at(-1) + room)
    .map(({ curve, at }) => ({ curve, x: curve.x[at], y: curve.y[at] }));
}

function mark(chart, x) {
  const across = placeX(chart.axes, x), [, , , , , , bottom, top] = chart.axes;
  chart.cursor.innerHTML = `<path d="M${across} ${bottom}V${top}"/>` + points(chart, x).map((point) =>
    `<circle class="c${point.curve.colour}" r="3.5" cx="${placeX(chart.axes, point.x)}" cy="${placeY(chart.axes, point.y)}"/>`
  ).join("");
}

function tell(chart, x, event) {
  tip.replaceChildren(...points(chart, x).map((point) => {
    const line = document.createElement("div"), colour = document.createElement("i");
    colour.className = `c${point.curve.colour}`;
    line.append(colour, `${point.curve.name} at ${point.x.toLocaleString("en")}: ${point.y.toLocaleString("en", { maximumSignificantDigits: 7 })}`);
    return line;
  }));
  tip.style.display = "block";
  const left = event.clientX + 16, width = tip.offsetWidth;
  tip.style.left = `${left + width > innerWidth ? event.clientX - 16 - width : left}px`;
  tip.style.top = `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4)}px`;
}

for (const chart of charts) {
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect(), [low, high, start, end] = chart.axes;
    const pixel = ((event.clientX - box.left) / box.width) * chart.svg.viewBox.baseVal.width;
    const x = Math.min(Math.max(low + ((pixel - start) / (end - start)) * (high - low), low), high);
    for (const each of charts) mark(each, x);
    tell(chart, x, event);
  });
  chart.svg.addEventListener("pointerleave", () => {
    for (const each of charts) each.cursor.replaceChildren();
    tip.style.display = "none";
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement.style;
  const isDark = root.colorScheme ? root.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.colorScheme = isDark ? "light" : "dark";
});
