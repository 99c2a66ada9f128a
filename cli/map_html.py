"""Attention maps as one HTML file to look around in: no network, no library, nothing that a token could break."""

from __future__ import annotations

import base64
import html
import json
import re

from .attention_map import ABOVE, BELOW, AttentionMap

_STEPS = 32767  # weights are stored as 16-bit shares of the peak


def draw_html(found: AttentionMap) -> bytes:
    import numpy as np

    shares = np.rint(found.weights / found.peak * _STEPS).astype("<i2")  # (layers, heads, rows, columns)
    content = {
        "layers": found.layers,
        "heads": found.heads,
        "rows": found.rows,
        "columns": found.columns,
        "peak": found.peak,
        "darkest": found.darkest(),
        "negative": found.has_negative,
        "above": ABOVE,
        "below": BELOW,
        "shares": base64.b64encode(shares.tobytes()).decode("ascii"),
    }
    data = json.dumps(content).replace("<", "\\u003c")  # no token can end the script element
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in found.notes)
    parts = {"@TITLE@": html.escape(found.title), "@NOTES@": notes, "@DATA@": data}
    page = re.sub("@TITLE@|@NOTES@|@DATA@", lambda match: parts[match[0]], _PAGE)
    return page.encode("ascii", "xmlcharrefreplace")


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
  body { margin: 24px; font: 14px/1.4 system-ui, sans-serif; color: #1c1c1e; background: #fff; }
  h1 { margin: 0; font-size: 20px; font-weight: 600; }
  p { margin: 2px 0; color: #5c5f66; }
  main { display: flex; gap: 32px; margin-top: 20px; align-items: flex-start; }
  table { border-spacing: 4px; }
  th { font-weight: 400; font-size: 12px; color: #5c5f66; white-space: nowrap; }
  #grid canvas { display: block; border: 1px solid #b4b8c0; cursor: pointer;
                 image-rendering: pixelated; }
  #grid canvas.chosen { outline: 2px solid #d9480f; }
  #overview { flex: none; max-width: 45vw; max-height: 80vh; overflow: auto; }
  #controls { display: flex; gap: 16px; align-items: center; margin-bottom: 8px; }
  #said { min-height: 1.4em; font-variant-numeric: tabular-nums; white-space: pre; }
  #scale { display: flex; gap: 8px; align-items: center; margin-top: 8px; font-size: 12px; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
@NOTES@
<main>
  <div id="overview"><table id="grid"></table></div>
  <div>
    <div id="controls">
      <label>layer <select id="layer"></select></label>
      <label>head <select id="head"></select></label>
    </div>
    <div id="said"></div>
    <canvas id="map"></canvas>
    <div id="scale"><span id="low"></span><canvas id="bar" width="200" height="12"></canvas><span id="high"></span></div>
  </div>
</main>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const R = data.rows.length, C = data.columns.length, H = data.heads.length;
const shares = new Int16Array(Uint8Array.from(atob(data.shares), c => c.charCodeAt(0)).buffer);
const get = id => document.getElementById(id);
const chosen = { layer: 0, head: 0, row: -1, column: -1 };
const cell = Math.max(1, Math.min(28, Math.floor(720 / Math.max(R, C))));
const every = Math.ceil(15 / cell);  // labels must not touch
const font = "12px system-ui, sans-serif";

const rgb = text => [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16));
const tables = [data.above.map(rgb), data.below.map(rgb)];
function colour(share) {
  const anchors = tables[share < 0 ? 1 : 0], place = Math.min(1, Math.abs(share)) * (anchors.length - 1);
  const low = Math.min(Math.floor(place), anchors.length - 2), part = place - low;
  return anchors[low].map((value, i) => Math.round(value * (1 - part) + anchors[low + 1][i] * part));
}
const palette = Array.from({ length: 2 * 1024 + 1 }, (_, i) => colour(i / 1024 - 1));
const shade = share => palette[Math.round((Math.max(-1, Math.min(1, share * data.peak / data.darkest)) + 1) * 1024)];
const shareAt = (layer, head, r, c) => shares[((layer * H + head) * R + r) * C + c] / 32767;

function picture(layer, head) {  // one pixel a weight
  const canvas = document.createElement("canvas");
  canvas.width = C; canvas.height = R;
  const context = canvas.getContext("2d"), image = context.createImageData(C, R);
  for (let r = 0, at = 0; r < R; r++)
    for (let c = 0; c < C; c++, at += 4)
      image.data.set([...shade(shareAt(layer, head, r, c)), 255], at);
  context.putImageData(image, 0, 0);
  return canvas;
}

function short(text) { return text.length > 18 ? text.slice(0, 17) + "\\u2026" : text; }

function width(labels, context) { return Math.ceil(Math.max(...labels.map(t => context.measureText(short(t)).width))); }

function draw() {
  const canvas = get("map"), context = canvas.getContext("2d"), zoom = window.devicePixelRatio || 1;
  context.font = font;
  const left = width(data.rows.filter((_, i) => i % every === 0), context) + 10;
  const top = width(data.columns.filter((_, i) => i % every === 0), context) + 10;
  canvas.width = (left + C * cell + 1) * zoom; canvas.height = (top + R * cell + 1) * zoom;
  canvas.style.width = canvas.width / zoom + "px";
  context.scale(zoom, zoom);
  context.imageSmoothingEnabled = false;
  context.drawImage(picture(chosen.layer, chosen.head), left, top, C * cell, R * cell);
  context.strokeStyle = "#b4b8c0";
  context.strokeRect(left - 0.5, top - 0.5, C * cell + 1, R * cell + 1);
  context.font = font;
  context.textBaseline = "middle";
  const label = (text, i, at) => {
    if (i % every && i !== at) return;
    if (every > 1 && at >= 0 && i !== at && Math.abs(i - at) < every) return;  // makes room for the one under the mouse
    context.fillStyle = i === at ? "#d9480f" : "#1c1c1e";
    context.fillText(short(text), 0, 0);
  };
  data.rows.forEach((text, i) => {
    context.save(); context.textAlign = "right"; context.translate(left - 6, top + (i + 0.5) * cell);
    label(text, i, chosen.row); context.restore();
  });
  data.columns.forEach((text, i) => {
    context.save(); context.translate(left + (i + 0.5) * cell, top - 6); context.rotate(-Math.PI / 2);
    label(text, i, chosen.column); context.restore();
  });
  if (chosen.row >= 0) {
    context.strokeStyle = "#d9480f";
    context.strokeRect(left + chosen.column * cell - 0.5, top + chosen.row * cell - 0.5, cell + 1, cell + 1);
  }
  return { left, top };
}

function say() {
  const { layer, head, row, column } = chosen;
  get("said").textContent = row < 0 ? "point at a weight" :
    `${data.rows[row]} (${row}) \\u2192 ${data.columns[column]} (${column}): ` +
    (shareAt(layer, head, row, column) * data.peak).toPrecision(3);
}

let origin = { left: 0, top: 0 };
function show() {
  get("layer").value = chosen.layer; get("head").value = chosen.head;
  document.querySelectorAll("#grid canvas").forEach((canvas, i) =>
    canvas.classList.toggle("chosen", i === chosen.layer * H + chosen.head));
  origin = draw(); say();
}

function point(event) {
  const box = get("map").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - origin.left) / cell);
  const row = Math.floor((event.clientY - box.top - origin.top) / cell);
  const inside = row >= 0 && row < R && column >= 0 && column < C;
  const [r, c] = inside ? [row, column] : [-1, -1];
  if (r !== chosen.row || c !== chosen.column) { chosen.row = r; chosen.column = c; origin = draw(); say(); }
}

function fill(id, names) {
  names.forEach((name, i) => get(id).add(new Option(name.replace(id + " ", ""), i)));
  get(id).onchange = event => { chosen[id] = Number(event.target.value); show(); };
}

function overview() {
  const heading = text => { const th = document.createElement("th"); th.textContent = text; return th; };
  const first = get("grid").insertRow();
  first.append(heading("head"), ...data.heads.map(name => heading(name.replace("head ", ""))));
  const side = Math.max(24, Math.min(64, Math.floor(480 / H))) + "px";
  data.layers.forEach((name, layer) => {
    const row = get("grid").insertRow();
    row.append(heading(name));
    data.heads.forEach((_, head) => {
      const canvas = picture(layer, head);
      canvas.style.width = canvas.style.height = side;
      canvas.title = `${name}, ${data.heads[head]}`;
      canvas.onclick = () => { chosen.layer = layer; chosen.head = head; show(); };
      row.insertCell().append(canvas);
    });
  });
}

function scale() {
  const context = get("bar").getContext("2d"), lowest = data.negative ? -1 : 0;
  for (let x = 0; x < 200; x++) {
    context.fillStyle = `rgb(${colour(lowest + (1 - lowest) * x / 199)})`;
    context.fillRect(x, 0, 1, 12);
  }
  const more = data.peak > data.darkest ? "+" : "";
  get("low").textContent = lowest ? (-data.darkest).toPrecision(2) + more : "0";
  get("high").textContent = data.darkest.toPrecision(2) + more;
}

fill("layer", data.layers); fill("head", data.heads);
overview(); scale(); show();
get("map").onmousemove = point;
get("map").onmouseleave = point;
</script>
</body>
</html>
"""
