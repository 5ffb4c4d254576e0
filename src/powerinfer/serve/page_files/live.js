// The live view: polls /v1/engine/live while the page is visible, and draws the neurons of each layer as they fire.
const $ = (id) => document.getElementById(id);
const EVERY = 500; // ms
const PLACED = 5;  // pixels of a row that show the placement

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);

function bytes(count) {
  if (count === null) return "–";
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
  constructor(ask) {
    this.ask = ask;
    this.query = "";       // of the chosen model, where the server has several
    this.frame = null;
    this.kept = new Map(); // by layer: its last counted figures, shown while nothing is decoded
    this.at = null;        // [row, column] whose figures are shown
    this.timer = 0;
    const canvas = (this.canvas = $("strip"));
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.move(event));
    canvas.addEventListener("focus", () => { this.at ??= [0, 0]; this.draw(); });
    $("look").addEventListener("change", () => this.start());
    document.addEventListener("visibilitychange", () => this.start());
    addEventListener("resize", () => this.draw());
  }

  of(model) {
    this.query = `?model=${encodeURIComponent(model)}`;
    this.kept.clear();
  }

  start() {
    clearTimeout(this.timer);
    if ($("look").checked && !document.hidden) this.poll();
  }

  async poll() {
    try {
      this.frame = await (await this.ask(`v1/engine/live${this.query}`)).json();
      for (const layer of this.frame.layers) if (layer.fired || !this.kept.has(layer.layer)) this.kept.set(layer.layer, layer);
      this.show();
    } catch { /* the chat tells what is wrong; try again */ }
    clearTimeout(this.timer);
    if ($("look").checked && !document.hidden) this.timer = setTimeout(() => this.poll(), EVERY);
  }

  show() {
    const frame = this.frame, layers = frame.layers;
    const rate = frame.tokens_per_second;
    const counted = layers.map((one) => this.kept.get(one.layer)).filter((one) => one.active_fraction !== null);
    const neurons = counted.reduce((sum, one) => sum + one.neurons, 0);
    const active = counted.reduce((sum, one) => sum + one.neurons * one.active_fraction, 0);
    const gpu = layers.reduce((sum, one) => sum + one.gpu_neurons, 0), all = layers.reduce((sum, one) => sum + one.neurons, 0);
    this.figures([
      ["Tokens/s, all requests", rate === null ? "–" : rate.toFixed(1)],
      ["Neurons that fire", neurons ? percent(active / neurons) : "not counted"],
      ["Weights read a token", bytes(frame.bytes_per_token)],
      ["Neurons on the GPU", gpu ? percent(gpu / all) : "none"],
      ["In steps", frame.busy === null ? "–" : percent(frame.busy)],
      ["Running, waiting", `${frame.running}, ${frame.waiting}`],
      ...(frame.overlap ? [["CPU sums cold neurons", percent(frame.overlap.cpu)], ["CPU waits for GPU", percent(frame.overlap.wait)]] : []),
    ]);
    const reasons = new Map();
    for (const one of layers) if (one.why_not) reasons.set(one.why_not, (reasons.get(one.why_not) ?? 0) + 1);
    $("live-note").textContent = [...reasons].map(([why, n]) => `${n} of ${layers.length} layers: ${why}.`).join(" ");
    $("legend").textContent = "Rows are layers, columns neurons by index. Black-blue: none of the bin fired, yellow: all; grey: not counted."
      + (gpu ? " The line under a row: green on the GPU (hot), none on the CPU (cold)." : "");
    $("rows").replaceChildren(...layers.map((one) => this.row(one)));
    this.draw();
  }

  figures(pairs) {
    $("figures").replaceChildren(...pairs.map(([name, value]) => {
      const box = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name;
      dd.textContent = value;
      box.append(dt, dd);
      return box;
    }));
  }

  row(one) {
    const row = document.createElement("tr"), last = this.kept.get(one.layer);
    const cells = [one.layer, one.neurons, one.way, { cpu: "CPU", gpu: "GPU", both: "GPU and CPU" }[one.device], one.gpu_neurons,
                   one.neurons - one.gpu_neurons, percent(last.active_fraction), bytes(last.ffn_bytes_per_token)];
    row.append(...cells.map((value) => Object.assign(document.createElement("td"), { textContent: value })));
    return row;
  }

  draw() {
    if (!this.frame) return;
    const { canvas } = this, layers = this.frame.layers, ratio = devicePixelRatio || 1;
    const height = Math.max(6, Math.min(22, Math.floor(560 / layers.length)));
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
    const first = Math.floor(column * one.neurons / bins), end = Math.floor((column + 1) * one.neurons / bins) - 1;
    const fired = last.fired ? `${(last.fired[column] / 10).toFixed(1)} % fire; layer: ${percent(last.active_fraction)} active` : "not counted";
    const gpu = one.on_gpu ? `, ${(one.on_gpu[column] / 10).toFixed(0)} % on the GPU` : one.device === "gpu" ? ", on the GPU" : ", on the CPU";
    $("hover").textContent = `Layer ${one.layer}, ${one.way}; neurons ${first} to ${end}: ${fired}${gpu}.`;
  }
}
