// The live view: polls /v1/engine/live while it is open and the page visible, and draws the neurons of each layer as they
// fire, those that fire most often on the left.
import { ask } from "./server.js";

const $ = (id) => document.getElementById(id);
const EVERY = 500; // ms
const PLACED = 5;  // pixels of a row that show the placement

const percent = (share) => (share === null ? "\u2013" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function bytes(count) {
  if (count === null) return "\u2013";
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; count >= 1024 && unit < 3; unit++) count /= 1024;
  return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

// Dark blue, violet, orange, yellow by share; the square root shows rare firing.
function colour(share) {
  const stops = [[13, 18, 60], [110, 30, 130], [225, 90, 60], [252, 240, 150]], at = Math.sqrt(Math.min(1, share)) * 3;
  const low = Math.min(2, Math.floor(at)), part = at - low;
  return `rgb(${stops[low].map((one, i) => Math.round(one + part * (stops[low + 1][i] - one))).join(" ")})`;
}

export class Live {
  // gone: called when the model does not answer; then nothing is asked until `of` names one again.
  constructor(gone) {
    this.gone = gone;
    this.model = undefined; // whose layers are shown; null: none is loaded
    this.frame = null;
    this.kept = new Map(); // by layer: its last counted figures, shown while nothing is decoded
    this.rate = null;      // the last one, as well
    this.at = null;        // [row, column] whose figures are shown
    this.timer = this.turn = 0;
    this.known = null;     // the model that was folded or unfolded for what it is
    const canvas = (this.canvas = $("strip"));
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.move(event));
    canvas.addEventListener("focus", () => { this.at ??= [0, 0]; this.draw(); });
    $("live").addEventListener("toggle", () => this.start());
    document.addEventListener("visibilitychange", () => this.start());
    addEventListener("resize", () => this.draw());
  }

  of(model) {
    if (model === this.model) return;
    this.model = model;
    this.frame = this.rate = this.at = null;
    this.kept.clear();
    $("live").hidden = model === null;
    this.start();
  }

  get wanted() {
    return this.model && !document.hidden && ($("live").open || this.known !== this.model);
  }

  start() {
    clearTimeout(this.timer);
    if (this.wanted) this.poll(++this.turn);
  }

  // turn: of `start`; an answer to an earlier one is of another model, or comes twice.
  async poll(turn) {
    try {
      const frame = await (await ask(`v1/engine/live?model=${encodeURIComponent(this.model)}`)).json();
      if (turn !== this.turn) return;
      this.frame = frame;
      for (const layer of frame.layers) if (layer.fired || !this.kept.has(layer.layer)) this.kept.set(layer.layer, layer);
      if (frame.tokens > 1 && frame.busy) this.rate = frame.tokens / (frame.seconds * frame.busy);
      this.fold();
      this.show();
    } catch {
      if (turn !== this.turn) return;
      this.model = undefined;
      this.gone();
      return;
    }
    clearTimeout(this.timer);
    if (this.wanted) this.timer = setTimeout(() => this.poll(turn), EVERY);
  }

  // Where every neuron is computed there is nothing to see: the view is one line, which says why.
  fold() {
    if (this.known === this.model) return;
    this.known = this.model;
    const some = this.frame.layers.some((layer) => layer.why_not === null);
    $("live").open = some && matchMedia("(min-width: 761px)").matches;
  }

  show() {
    const frame = this.frame, layers = frame.layers, { carried, hot, tokens, profile_tokens } = frame.ranking;
    const counted = layers.map((one) => this.kept.get(one.layer)).filter((one) => one.active_fraction !== null);
    const neurons = counted.reduce((sum, one) => sum + one.neurons, 0);
    const active = counted.reduce((sum, one) => sum + one.neurons * one.active_fraction, 0);
    const gpu = layers.reduce((sum, one) => sum + one.gpu_neurons, 0), all = layers.reduce((sum, one) => sum + one.neurons, 0);
    const counts = layers.some((layer) => layer.why_not === null), overlap = frame.overlap;
    this.figures([
      this.rate && ["Speed", `${this.rate.toFixed(1)} tokens/s`, "Tokens written for each second in which the engine is at work, of all requests to this model together"],
      neurons && ["Neurons that fired", percent(active / neurons), "Of the neurons of a layer, those that were not zero for a token; a layer that decodes sparsely reads the weights of these alone"],
      counts && carried && [`The hottest ${percent(hot)}`, `${percent(carried)} of firings`, "The share of all activations that the neurons carry which fire most often"],
      frame.bytes_per_token && ["Read for a token", bytes(frame.bytes_per_token), "Weights that are read from memory for each token that is written: what mostly sets the speed"],
      gpu && ["Neurons on the GPU", percent(gpu / all), "The hot ones; the rest are computed by the CPU"],
      frame.drafts && ["Drafts that are right", percent(frame.drafts.accepted), "The share of guessed tokens that the model wrote, too: a step with drafts brings several tokens at once"],
      frame.drafts && ["Tokens of a step with drafts", frame.drafts.tokens_per_step.toFixed(1), "Tokens that one step brought when some were guessed before"],
      overlap && ["CPU beside the GPU", percent(overlap.cpu), "The share of the time at work in which the CPU computes cold neurons while the GPU computes hot ones"],
      overlap && ["CPU waits for the GPU", percent(overlap.wait), "The share of the time at work in which the CPU has nothing to do until the GPU is done"],
      frame.running + frame.waiting > 1 && ["Requests", `${frame.running} answered, ${frame.waiting} waiting`, "Of all users of this server"],
    ].filter(Boolean));
    const reasons = new Map();
    for (const one of layers) if (one.why_not) reasons.set(one.why_not, (reasons.get(one.why_not) ?? 0) + 1);
    const told = [...reasons].map(([why, n]) => (n === layers.length ? sentence(why) : `${n} of ${layers.length} layers: ${why}.`));
    $("live-note").textContent = layers.length ? told.join(" ") : "No layer of this model has neurons that could be skipped.";
    $("picture").hidden = !counts;
    $("grey-key").hidden = layers.every((one) => this.kept.get(one.layer).fired);
    $("gpu-key").hidden = !gpu;
    $("order").textContent = tokens ? `by ${tokens.toLocaleString()} tokens${profile_tokens ? ", most of a profile" : ""}` : "";
    $("table").hidden = !layers.length;
    $("rows").replaceChildren(...layers.map((one) => this.row(one)));
    this.draw();
  }

  figures(found) {
    $("figures").replaceChildren(...found.map(([name, value, title]) => {
      const box = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name;
      dd.textContent = value;
      box.title = title;
      box.append(dt, dd);
      return box;
    }));
  }

  row(one) {
    const row = document.createElement("tr"), last = this.kept.get(one.layer);
    const cells = [one.layer, one.neurons, one.way === "dense" ? "densely" : `sparsely (${one.way})`,
                   { cpu: "CPU", gpu: "GPU", both: "GPU and CPU" }[one.device], one.gpu_neurons,
                   one.neurons - one.gpu_neurons, percent(last.active_fraction), bytes(last.ffn_bytes_per_token)];
    row.append(...cells.map((value) => Object.assign(document.createElement("td"), { textContent: value })));
    return row;
  }

  draw() {
    if (!this.frame || $("picture").hidden || !$("live").open) return;
    const { canvas } = this, layers = this.frame.layers, ratio = devicePixelRatio || 1;
    const room = Math.max(240, Math.min(560, innerHeight - 400)); // all layers are seen without scrolling
    const height = Math.max(6, Math.min(22, Math.floor(room / layers.length)));
    const wide = canvas.clientWidth;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(height * layers.length * ratio);
    canvas.style.height = `${height * layers.length}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.height = height;
    layers.forEach((one, row) => this.strip(pen, this.kept.get(one.layer), one, row * height, wide, height));
    if (this.at) {
      const [row, column] = this.at, bins = this.bins(layers[row]);
      pen.strokeStyle = getComputedStyle(canvas).color;
      pen.lineWidth = 2;
      pen.strokeRect(column * wide / bins, row * height, Math.max(3, wide / bins), height - 1);
      this.tell();
    }
  }

  bins(one) {
    return (this.kept.get(one.layer).fired ?? one.on_gpu ?? [0]).length;
  }

  strip(pen, last, one, top, wide, height) {
    const line = one.gpu_neurons ? Math.max(2, Math.min(PLACED, height / 4)) : 0, tall = height - 1 - line;
    if (!last.fired) {
      pen.fillStyle = "#8888";
      pen.fillRect(0, top, wide, tall);
    } else {
      const step = wide / last.fired.length;
      last.fired.forEach((share, bin) => {
        pen.fillStyle = colour(share / 1000);
        pen.fillRect(bin * step, top, step + 0.5, tall);
      });
    }
    const placed = one.on_gpu ?? (one.device === "gpu" ? [1000] : []), step = wide / placed.length;
    placed.forEach((share, bin) => {
      pen.fillStyle = `rgb(40 180 90 / ${share / 1000})`;
      pen.fillRect(bin * step, top + tall, step + 0.5, line);
    });
  }

  point(event) {
    if (!this.frame) return;
    const box = this.canvas.getBoundingClientRect(), layers = this.frame.layers;
    const row = Math.min(layers.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / this.height)));
    const bins = this.bins(layers[row]);
    this.at = [row, Math.min(bins - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * bins)))];
    this.draw();
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.frame) return;
    event.preventDefault();
    const layers = this.frame.layers, row = Math.min(layers.length - 1, Math.max(0, (this.at?.[0] ?? 0) + step[0]));
    this.at = [row, Math.min(this.bins(layers[row]) - 1, Math.max(0, (this.at?.[1] ?? 0) + step[1]))];
    this.draw();
  }

  tell() {
    const [row, column] = this.at, one = this.frame.layers[row], last = this.kept.get(one.layer), bins = this.bins(one);
    const first = Math.floor(column * one.neurons / bins) + 1, end = Math.floor((column + 1) * one.neurons / bins);
    const fired = last.fired ? `fired for ${(last.fired[column] / 10).toFixed(1)} % of the tokens, all of the layer for ${percent(last.active_fraction)}` : "not counted";
    const gpu = one.on_gpu ? `, ${(one.on_gpu[column] / 10).toFixed(0)} % on the GPU` : one.device === "gpu" ? ", on the GPU" : "";
    $("hover").textContent = `Layer ${one.layer}, neurons ranked ${first} to ${end} of ${one.neurons}: ${fired}${gpu}.`;
  }
}
