import { ask, events, Lost, Refused, useKey } from "./server.js";
import { Chats, FULL } from "./chats.js";
import { lasting, Memory, ofTab } from "./storage.js";
import { Rendered } from "./markdown.js";
import { Live } from "./live.js";

const $ = (id) => document.getElementById(id);
const DEFAULTS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"], NUMBERS = [...DEFAULTS, "max_tokens", "seed"];
const KEEP = "powerinfer.keep", CURRENT = "powerinfer.current";
const SAVE_EVERY = 2000; // ms, of an answer that grows
const MOST_FILE = 512 * 1024; // bytes of a file that is added
const QUESTIONS = ["What is the capital of France?", "Why is the sky blue? Answer in two sentences.", "Write a Python function that reverses a string."];
const BEGINNINGS = ["Once upon a time", "The capital of France is"]; // for a model without a chat template

let models = [], chosen = null; // rows of the server's overview; the name of the one that answers
let chat = Chats.fresh(), running = null; // the AbortController of the answer under way

const row = () => models.find(({ id }) => id === chosen) ?? null;
const loaded = () => row()?.loaded ?? null;

// ---- Small things

function make(name, properties = {}, ...inner) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...inner);
  return node;
}

const button = (name, action, title = "") => {
  const node = make("button", { type: "button", textContent: name, title });
  node.addEventListener("click", () => action(node));
  return node;
};

async function copy(text, node) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch { // only pages of this machine and of https have that
    const area = document.body.appendChild(make("textarea", { value: text, className: "hidden" }));
    area.select();
    done = document.execCommand("copy");
    area.remove();
    node.focus();
  }
  const name = node.textContent;
  node.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { node.textContent = name; }, 1500);
}

const copier = (text) => {
  const node = button("Copy", () => copy(text, node));
  node.setAttribute("aria-label", "Copy the code");
  return node;
};

const status = (text) => { $("status").textContent = text; };

// ---- Chats that are kept

const memory = new Memory();
const keeps = () => lasting !== null && lasting.getItem(KEEP) !== "no";
const chats = new Chats(keeps() ? lasting : memory);

function keepChats(on) {
  $("keep").checked = on;
  chats.move(on ? lasting : memory);
  showChats();
}

function save() {
  if (!chat.messages.length) return;
  chat.model = chosen ?? chat.model;
  chat.system = $("system").value;
  if (chats.write(chat) === FULL) status("This chat is too long to be kept in this browser.");
  if (chat.id) ofTab.setItem(CURRENT, chat.id);
  showChats();
}

function open(id) {
  const found = id ? chats.read(id) : Object.assign(Chats.fresh(), { system: $("system").value });
  if (!found) return;
  stop();
  chat = found;
  if (chat.id) ofTab.setItem(CURRENT, chat.id);
  else ofTab.removeItem(CURRENT);
  $("system").value = chat.system;
  if (chat.model && models.some((one) => one.id === chat.model)) choose(chat.model);
  showSide(false);
  show();
  showChats();
}

function forget(id, title) {
  if (!confirm(`Forget the chat "${title}"?`)) return;
  if (id === chat.id) stop();
  chats.forget(id);
  if (id === chat.id) open(null);
  showChats();
}

function showChats() {
  const all = chats.list();
  $("chat-list").replaceChildren(...all.map(({ id, title, at }) => {
    const name = title || "Chat", enter = button(name, () => open(id), `${name}\n${new Date(at).toLocaleString()}`);
    if (id === chat.id) enter.setAttribute("aria-current", "true");
    const away = button("\u00d7", () => forget(id, name), "Forget this chat");
    away.setAttribute("aria-label", `Forget the chat ${name}`);
    return make("li", {}, enter, away);
  }));
  $("forget-all").disabled = !all.length;
}

// Where there is no room for it beside the chat, the list comes and goes.
function showSide(on) {
  $("side").classList.toggle("shown", on);
  $("chats-button").setAttribute("aria-expanded", String(on));
}

// Another tab has changed a chat. What this tab is writing stays as it is; `Chats.write` sees that it has changed.
function changedElsewhere({ key }) {
  if (key === KEEP) keepChats(keeps());
  if (key === null || chats.idOf(key)) showChats();
  if (running || !chat.id || (key !== null && chats.idOf(key) !== chat.id) || document.querySelector(".editing")) return;
  const now = chats.read(chat.id);
  if (!now) open(null);
  else if (now.revision !== chat.revision) { chat = now; show(); }
}

// ---- Messages

function shown(message, number) {
  const user = message.role === "user", node = make("article", { className: `message ${message.role}` });
  node.setAttribute("aria-label", user ? "You" : "Model");
  const body = make("div"), tools = make("div", { className: "tools" }), note = make("span");
  const problem = make("p", { className: "problem" }), rendered = new Rendered(body, copier);
  const title = make("summary"), thinking = make("p"), thought = make("details", { className: "thought" }, title, thinking);
  const bar = make("progress", { max: 1 }), waits = make("p", { className: "soft" }, "", bar);
  const go = button("Continue", () => proceed(number), "Let the model go on with this answer");
  const undo = button("Undo", () => restore(message), "Bring back what was here before Retry or Edit");
  const copies = button("Copy", () => copy(message.content, copies));
  if (user) tools.append(button("Edit", () => edit(number, node)), copies);
  else tools.append(button("Retry", () => retry(number)), go, undo, copies, note);
  node.append(...(user ? [body, tools] : [thought, body, waits, problem, tools]));
  const update = () => {
    const busy = message.busy ?? false, last = number === chat.messages.length - 1;
    thought.hidden = !message.thought;
    title.textContent = busy && !message.content ? `Thinking\u2026 ${Math.round(message.seconds ?? 0)} s` : `Thought for ${Math.max(1, Math.round(message.seconds ?? 0))} s`;
    if (thinking.textContent !== (message.thought ?? "")) thinking.textContent = message.thought ?? "";
    if (user) body.replaceChildren(make("p", { textContent: message.content }));
    else rendered.set(message.content);
    body.classList.toggle("waits", busy && !message.content && !message.thought);
    const progress = busy && !message.content ? message.waiting : null;
    waits.hidden = !progress;
    if (progress) {
      waits.firstChild.textContent = `${progress.text} `;
      if (progress.share === null) bar.removeAttribute("value");
      else bar.value = progress.share;
    }
    problem.textContent = message.error ?? "";
    problem.hidden = !message.error;
    note.textContent = busy ? "" : message.note ?? "";
    copies.hidden = !message.content;
    go.hidden = busy || !message.cut || !message.content || !last || loaded()?.chats === false;
    undo.hidden = busy || !message.before;
    node.classList.toggle("error", Boolean(message.error));
  };
  update();
  return { node, update };
}

function greeting() {
  const fits = loaded()?.chats === false ? BEGINNINGS : QUESTIONS;
  const what = loaded()?.chats === false ? "This model has no chat template: it continues your text." : "Ask a question, or begin with one of these.";
  return make("div", { id: "greeting" }, make("p", { textContent: what }), make("div", {}, ...fits.map((text) => button(text, () => submit(text)))));
}

function show() {
  const nodes = chat.messages.map((message, number) => shown(message, number).node);
  $("log").replaceChildren(...(nodes.length ? nodes : [greeting()]));
  $("log").scrollTop = $("log").scrollHeight;
}

function edit(number, node) {
  const before = chat.messages[number].content, area = make("textarea", { value: before, rows: Math.min(12, before.split("\n").length + 1) });
  area.setAttribute("aria-label", "Edited message");
  const accept = () => {
    const text = area.value.trim();
    if (text) answerAgain(number, [{ role: "user", content: text }]);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); show(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); accept(); }
  });
  const tools = make("div", { className: "tools" }, button("Send", accept), button("Cancel", show));
  node.classList.add("editing");
  node.replaceChildren(area, tools);
  area.focus();
}

// Answers anew from a message on. What was there is kept until the page is left: Undo brings it back.
function answerAgain(number, begin) {
  stop();
  const before = chat.messages.splice(number, Infinity, ...begin);
  answer({ role: "assistant", content: "", before: { at: number, messages: before.map((one) => ({ ...one, before: undefined })) } });
}

const retry = (number) => answerAgain(number, []);

function restore({ before: { at, messages } }) {
  stop();
  chat.messages.splice(at, Infinity, ...messages);
  show();
  save();
}

function proceed(number) {
  stop();
  const message = chat.messages[number];
  chat.messages.length = number;
  answer(Object.assign(message, { error: undefined, note: undefined }));
}

function stop() {
  running?.abort();
}

// ---- An answer

// Some templates refuse two messages of the same role: those to which no answer came go together.
function said(messages) {
  const all = [];
  for (const { role, content } of messages) {
    if (!content) continue;
    if (all.at(-1)?.role === role) all.at(-1).content += `\n\n${content}`;
    else all.push({ role, content });
  }
  return all;
}

function body(messages, continued) {
  const system = $("system").value.trim();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...said(messages)];
  const wanted = { stream: true, stream_options: { include_usage: true }, ...(chosen && { model: chosen }) };
  if (loaded()?.chats === false) Object.assign(wanted, { prompt: all.map(({ content }) => content).join(""), max_tokens: 256 });
  else Object.assign(wanted, { messages: all }, continued && { continue_final_message: true, add_generation_prompt: false });
  for (const name of NUMBERS) if ($(name).value !== "") wanted[name] = Number($(name).value);
  return JSON.stringify(wanted);
}

// Waits while the only model is being loaded. One of several is loaded by the request itself.
async function ready(signal) {
  while (models.length === 1 && row()?.status === "loading") {
    await new Promise((resolve) => { setTimeout(resolve, 300); });
    signal.throwIfAborted();
  }
}

async function generate(messages, continued, signal) {
  await ready(signal);
  const request = () => ask(loaded()?.chats === false ? "v1/completions" : "v1/chat/completions", { method: "POST", body: body(messages, continued), signal });
  try {
    return await request();
  } catch (error) {
    if (error.code !== "no_chat_template") throw error; // of one that was not loaded before
    await look();
    return request();
  }
}

// Adds a message to the chat and fills it. Whatever goes wrong, what has come stays.
async function answer(message) {
  const control = (running = new AbortController()), log = $("log"), here = chat, asked = [...chat.messages];
  const continued = Boolean(message.content), begin = performance.now();
  if (continued) asked.push({ role: "assistant", content: message.content });
  Object.assign(message, { busy: true, cut: true, note: "interrupted" }); // as which it is kept if the page is left
  here.messages.push(message);
  show();
  save();
  const view = shown(message, here.messages.length - 1);
  log.lastChild.replaceWith(view.node);
  log.scrollTop = log.scrollHeight;
  $("stop").disabled = false;
  $("done").textContent = "";
  let first = 0, tokens = 0, usage = null, reason = null, due = false, saved = begin;
  const rate = () => (tokens > 1 ? `${((tokens - 1) / (performance.now() - first) * 1000).toFixed(1)} tokens/s` : "");
  const update = () => {
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60; // else the reader has scrolled up
    view.update();
    if (follows) log.scrollTop = log.scrollHeight;
  };
  const draw = () => {
    due = false;
    message.waiting = waitingFor();
    update();
    if (running === control) $("speed").textContent = rate();
    if (chat === here && performance.now() - saved > SAVE_EVERY) { saved = performance.now(); save(); }
  };
  const ticking = setInterval(draw, 500); // of what changes without a token: loading, thinking
  hurry();
  try {
    for await (const event of events(await generate(asked, continued, control.signal))) {
      if (event.error) throw new Refused(event.error.message);
      usage = event.usage ?? usage;
      reason = event.choices?.[0]?.finish_reason ?? reason;
      const delta = event.choices?.[0]?.delta, text = delta?.content ?? event.choices?.[0]?.text ?? "";
      const thought = delta?.reasoning_content ?? "";
      if (!text && !thought) continue;
      tokens++;
      first ||= performance.now();
      if (!message.content && message.thought) message.seconds = (performance.now() - first) / 1000;
      message.content += text;
      if (thought) message.thought = (message.thought ?? "") + thought;
      if (!due) { due = true; requestAnimationFrame(draw); }
    }
    message.cut = reason === "length";
    message.note = usage ? [`${usage.completion_tokens} tokens`, rate(), message.cut && "ended by the maximum of tokens"].filter(Boolean).join(", ") : "";
  } catch (error) {
    message.note = error.name === "AbortError" ? "stopped" : "";
    if (!message.note) message.error = failure(error);
    if (error instanceof Lost) setTimeout(look, 500);
  }
  clearInterval(ticking);
  Object.assign(message, { busy: false, waiting: null });
  update();
  const current = running === control;
  if (current) {
    running = null;
    $("stop").disabled = true;
    $("speed").textContent = "";
    $("done").textContent = message.error ?? (message.note === "stopped" ? "Answer stopped." : "Answer complete.");
  }
  if (chat === here) save();
  else if (here.id) chats.write(here);
}

function failure(error) {
  if (error.status === 401) $("key-form").hidden = false;
  if (error instanceof Lost) return "The connection to the server was lost. What has come is kept: try again once it answers.";
  if (!(error instanceof Refused)) return String(error.message);
  return `The server says: ${error.message}.${error.code === "context_length_exceeded" ? " A new chat has room again." : ""}`;
}

function waitingFor() {
  const one = row();
  if (one?.status === "loading" && one.loading?.total) {
    const { label, done, total } = one.loading;
    return { text: `Loading the model (${label}):`, share: done / total };
  }
  if (one && !one.loaded && one.status !== "failed") return { text: one.status === "loading" ? "Loading the model:" : "Waiting until the model can be loaded:", share: null };
  return null;
}

function submit(text) {
  if (!text || running) return false;
  if (row()?.status === "failed" && models.length === 1) {
    status(`The model cannot answer: ${row().reason}`);
    return false;
  }
  status("");
  chat.messages.push({ role: "user", content: text });
  answer({ role: "assistant", content: "" });
  return true;
}

function send(event) {
  event.preventDefault();
  if (submit($("text").value.trim())) $("text").value = "";
}

// ---- Files

async function add(files) {
  for (const file of files) {
    try {
      if (file.size > MOST_FILE) throw new Error(`is larger than ${MOST_FILE / 1024} KiB`);
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new Error("is not a text");
      const marks = [...text.matchAll(/`{3,}/g)].reduce((most, [run]) => (run.length >= most.length ? `${run}\`` : most), "```");
      const before = $("text").value.trimEnd();
      $("text").value = `${before}${before && "\n\n"}${file.name}:\n${marks}${/\.(\w{1,12})$/.exec(file.name)?.[1] ?? ""}\n${text.trimEnd()}\n${marks}\n`;
      status("");
    } catch (error) {
      status(`${file.name} ${error instanceof TypeError ? "is not a text in UTF-8" : error.message}: it was not added.`);
    }
  }
  $("text").focus();
}

// ---- The server's models

function choose(name) {
  chosen = name;
  $("models").value = name;
  describe();
}

// What of the page depends on the chosen model.
function describe() {
  const one = row(), facts = loaded();
  for (const name of DEFAULTS) $(name).placeholder = facts ? `${+facts.sampling[name].toFixed(3)}` : "default";
  $("max_tokens").placeholder = facts ? `up to ${facts.context}` : "no limit";
  $("note").hidden = !facts?.note;
  note.set(facts?.note ?? "");
  if (!chat.messages.length) show();
  live.of(facts ? chosen : null);
}

function showModels() {
  const several = models.length > 1, states = { ok: "loaded", loading: "loading", failed: "failed", unloaded: "" };
  $("model").textContent = several ? "" : models[0].id;
  $("models").hidden = !several;
  if (!several) return;
  const names = models.map(({ id, status: state }) => [states[state] ? `${id} (${states[state]})` : id, id]);
  const have = [...$("models").options].map((option) => [option.text, option.value]);
  if (JSON.stringify(names) !== JSON.stringify(have)) $("models").replaceChildren(...names.map(([text, id]) => new Option(text, id)));
  $("models").value = chosen;
}

function showLoading() {
  const one = models.length === 1 ? models[0] : null, share = one?.loading?.total ? one.loading.done / one.loading.total : null;
  $("loading").hidden = one?.status !== "loading";
  $("loading-text").textContent = `Loading ${one?.id}${one?.loading ? `: ${one.loading.label}` : ""}${share === null ? "" : `, ${Math.floor(100 * share)} %`}`;
  if (share === null) $("loading-bar").removeAttribute("value");
  else $("loading-bar").value = share;
}

let looking = 0, tries = 0, troubled = false; // the status tells why `look` got no answer

// Asks how the models are: often while one is being loaded, and again when the server has not answered.
async function look() {
  clearTimeout(looking);
  let wait = 15000;
  try {
    const { data } = await (await ask("v1/engine/models")).json(), before = JSON.stringify(models), known = chosen;
    models = data;
    $("key-form").hidden = true;
    if (troubled || !data.length) status(data.length ? "" : "This server has no model yet.");
    tries = 0;
    troubled = !data.length;
    // the first choice is a model that is loaded: another one takes a while to answer
    if (!row() && data.length) chosen = (data.find(({ id }) => id === chat.model) ?? data.find((one) => one.loaded) ?? data[0]).id;
    if (data.length && (before !== JSON.stringify(models) || known !== chosen)) {
      showModels();
      describe();
    }
    showLoading();
    if (data.length) live.of(loaded() ? chosen : null);
    if (data.length === 1 && data[0].status === "failed") status(`The model cannot answer: ${data[0].reason}`);
    if (!data.length) wait = 2000;
    else if (data.some((one) => one.status === "loading") || (running && !loaded())) wait = 400;
  } catch (error) {
    wait = error.status === 401 ? 0 : Math.min(10000, 1000 * 2 ** tries++);
    troubled = true;
    status(error instanceof Refused ? error.message : "The server does not answer; trying again.");
    if (error.status === 401) {
      status($("key-form").hidden ? "" : "This key is not valid.");
      $("key-form").hidden = false;
      $("key").focus();
    }
  }
  clearTimeout(looking);
  if (wait && (!document.hidden || running)) looking = setTimeout(look, wait);
}

// Soon, as something is about to happen: a model may be loaded for a request.
function hurry() {
  if (!loaded()) {
    clearTimeout(looking);
    looking = setTimeout(look, 200);
  }
}

// ---- Beginning

const note = new Rendered($("note"), copier);
const live = new Live(() => { clearTimeout(looking); looking = setTimeout(look, 500); });
$("ask").addEventListener("submit", send);
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => { open(null); $("text").focus(); });
$("models").addEventListener("change", () => choose($("models").value));
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if ($("side").classList.contains("shown")) showSide(false);
  else stop();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
addEventListener("pagehide", () => { if (running) save(); });
addEventListener("storage", changedElsewhere);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key").value = "";
  look();
});
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => { add([...$("files").files]); $("files").value = ""; });
for (const [kind, on] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  document.addEventListener(kind, (event) => {
    if (![...event.dataTransfer?.types ?? []].includes("Files")) return;
    event.preventDefault(); // else the browser leaves the page for the file
    document.body.classList.toggle("drop", on);
    if (kind === "drop") add([...event.dataTransfer.files]);
  });
}
$("chats-button").addEventListener("click", () => showSide(!$("side").classList.contains("shown")));
$("forget-all").addEventListener("click", () => {
  if (!confirm(`Forget all ${chats.list().length} chats?`)) return;
  stop();
  chats.forgetAll();
  open(null);
});
$("keep").checked = keeps();
$("keep").disabled = lasting === null;
$("keep").addEventListener("change", () => {
  if ($("keep").checked) lasting.removeItem(KEEP);
  else lasting.setItem(KEEP, "no");
  keepChats($("keep").checked);
});
for (const name of NUMBERS) {
  $(name).value = ofTab.getItem(`powerinfer.${name}`) ?? "";
  $(name).addEventListener("change", () => ofTab.setItem(`powerinfer.${name}`, $(name).value));
}
const before = ofTab.getItem(CURRENT);
show();
showChats();
if (before) open(before);
look();
$("text").focus();
