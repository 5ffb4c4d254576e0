import { render } from "./markdown.js";
import { Live } from "./live.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const STORE = "powerinfer.chat", KEY = "powerinfer.key";
let messages = [], running = null, chats = true;
let model = null; // the chosen one, where the server has several

// ---- The server

class Refused extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(options.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) $("key-form").hidden = false;
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Refused(told?.error?.message ?? `status ${answer.status}`, told?.error?.code);
  }
  return answer;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

// ---- The conversation

function button(name, action) {
  const node = document.createElement("button");
  node.type = "button";
  node.textContent = name;
  node.addEventListener("click", action);
  return node;
}

function shown(message, number) {
  const node = document.createElement("article");
  node.className = `message ${message.role}${message.error ? " error" : ""}`;
  node.setAttribute("aria-label", message.role === "user" ? "You" : "Model");
  const body = document.createElement("div"), tools = document.createElement("div");
  tools.className = "tools";
  if (message.role === "user") tools.append(button("Edit", () => edit(number)));
  else tools.append(button("Retry", () => retry(number)), button("Copy", () => navigator.clipboard?.writeText(message.content)));
  const note = document.createElement("span");
  tools.append(note);
  const thought = document.createElement("details"), thinking = paragraph("");
  thought.className = "thought";
  thought.append(Object.assign(document.createElement("summary"), { textContent: "Thoughts" }), thinking);
  thought.open = !message.content;
  node.append(thought, body, tools);
  const update = () => {
    thought.hidden = !message.thought;
    thinking.textContent = message.thought ?? "";
    if (message.content && !body.hasChildNodes()) thought.open = false; // folded when the answer begins
    body.replaceChildren(message.role === "user" ? paragraph(message.content) : render(message.content));
    note.textContent = message.error ?? message.note ?? "";
    node.classList.toggle("error", Boolean(message.error));
  };
  update();
  return { node, update };
}

function paragraph(text) {
  const node = document.createElement("p");
  node.textContent = text;
  return node;
}

function show() {
  $("log").replaceChildren(...messages.map((message, number) => shown(message, number).node));
  $("log").scrollTop = $("log").scrollHeight;
}

function keep() {
  if ($("keep").checked) localStorage.setItem(STORE, JSON.stringify(messages));
  else localStorage.removeItem(STORE);
}

function edit(number) {
  stop();
  $("text").value = messages[number].content;
  messages = messages.slice(0, number);
  show();
  keep();
  $("text").focus();
}

function retry(number) {
  stop();
  messages = messages.slice(0, number);
  answer();
}

function stop() {
  running?.abort();
}

// A model without a chat template continues the text.
function body() {
  const system = $("system").value.trim();
  const said = messages.filter((message) => message.content).map(({ role, content }) => ({ role, content }));
  const all = system ? [{ role: "system", content: system }, ...said] : said;
  const wanted = { stream: true, stream_options: { include_usage: true }, ...(model && { model }) };
  if (chats) wanted.messages = all;
  else Object.assign(wanted, { prompt: all.map(({ content }) => content).join(""), max_tokens: 256 });
  for (const name of NUMBERS) if ($(name).value !== "") wanted[name] = Number($(name).value);
  return JSON.stringify(wanted);
}

async function generate(signal) {
  const options = { method: "POST", body: body(), signal };
  try {
    return await ask(chats ? "v1/chat/completions" : "v1/completions", options);
  } catch (error) {
    if (error.code !== "no_chat_template") throw error;
    chats = false;
    $("status").textContent = "This model has no chat template: it continues your text.";
    return generate(signal);
  }
}

async function answer() {
  const control = (running = new AbortController()), log = $("log");
  const message = { role: "assistant", content: "" }; // empty: not sent
  messages.push(message);
  show();
  const view = shown(message, messages.length - 1);
  log.lastChild.replaceWith(view.node);
  $("stop").disabled = false;
  $("done").textContent = "";
  let first = 0, tokens = 0, usage = null, due = false;
  const draw = () => {
    due = false;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60; // else the reader has scrolled up
    view.update();
    if (follows) log.scrollTop = log.scrollHeight;
    if (tokens > 1) $("speed").textContent = `${((tokens - 1) / (performance.now() - first) * 1000).toFixed(1)} tokens/s`;
  };
  try {
    const reply = await generate(control.signal);
    for await (const event of events(reply)) {
      if (event.error) throw new Refused(event.error.message);
      usage = event.usage ?? usage;
      const delta = event.choices?.[0]?.delta, text = delta?.content ?? event.choices?.[0]?.text ?? "";
      const thought = delta?.reasoning_content ?? "";
      if (!text && !thought) continue;
      tokens++;
      first ||= performance.now();
      message.content += text;
      message.thought = (message.thought ?? "") + thought;
      if (!due) { due = true; requestAnimationFrame(draw); }
    }
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else message.error = error instanceof Refused ? error.message : "the connection to the server was lost";
  }
  draw();
  if (usage) message.note = `${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} generated`;
  view.update();
  if (running === control) {
    running = null;
    $("stop").disabled = true;
    $("done").textContent = message.error ?? `Answer ${message.note === "stopped" ? "stopped" : "complete"}.`;
    keep();
  }
}

function send(event) {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  $("text").value = "";
  answer();
}

// ---- Beginning

// The first choice is a model that is loaded: another one takes a while to answer.
function choices(models) {
  const list = $("models"), loaded = models.find((one) => one.status?.value === "loaded");
  list.replaceChildren(...models.map(({ id }) => new Option(id, id)));
  list.hidden = false;
  list.value = (loaded ?? models[0]).id;
  choose();
}

function choose() {
  model = $("models").value;
  chats = true;
  $("status").textContent = "";
  live.of(model);
}

async function begin() {
  try {
    const { data } = await (await ask("v1/models")).json();
    if (!data.length) throw new Refused("This server has no model yet.");
    if (data.length === 1) $("model").textContent = data[0].id;
    else choices(data);
    $("status").textContent = "";
    $("key-form").hidden = true;
    live.start();
  } catch (error) {
    $("status").textContent = error instanceof Refused ? error.message : "the server does not answer";
    if ($("key-form").hidden) setTimeout(begin, 2000);
    else $("key").focus();
  }
}

const live = new Live(ask);
$("ask").addEventListener("submit", send);
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => { stop(); messages = []; show(); keep(); $("text").focus(); });
$("keep").addEventListener("change", keep);
$("models").addEventListener("change", choose);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  begin();
});
try {
  const kept = JSON.parse(localStorage.getItem(STORE));
  if (Array.isArray(kept)) {
    messages = kept.filter((one) => ["user", "assistant"].includes(one?.role) && typeof one.content === "string")
                   .map(({ role, content }) => ({ role, content }));
    $("keep").checked = true;
  }
} catch { /* nothing that can be read is kept */ }
show();
begin();
$("text").focus();
