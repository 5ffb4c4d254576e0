// Chats kept in the browser. Each has a key of its own, so that a tab writes only the chat that it shows. The first line
// of a value is about the chat, the rest are its messages: a list of chats need not read them.
const PREFIX = "powerinfer.chat.", MOST = 100, ROOM = 4e6; // chats, and characters of all of them
const TITLE = 60, FIELDS = { role: "string", content: "string", thought: "string", seconds: "number", note: "string", error: "string", cut: "boolean" };

export const SAVED = "saved", FORGOTTEN = "forgotten", FULL = "full";

const kept = (message) => Object.fromEntries(Object.entries(FIELDS).flatMap(([name, kind]) => (typeof message[name] === kind ? [[name, message[name]]] : [])));

function titled(messages) {
  const first = messages.find(({ role }) => role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return first.length > TITLE ? `${first.slice(0, TITLE - 1)}\u2026` : first;
}

export class Chats {
  constructor(storage, now = Date.now) {
    this.storage = storage;
    this.now = now;
  }

  static fresh() {
    return { id: null, revision: 0, model: "", system: "", messages: [] };
  }

  keys() {
    return Array.from({ length: this.storage.length }, (_, at) => this.storage.key(at)).filter((key) => key?.startsWith(PREFIX));
  }

  // { id, title, at, revision, model, size }, newest first; what cannot be read is no chat.
  list() {
    return this.keys().map((key) => this.head(key.slice(PREFIX.length))).filter(Boolean).sort((a, b) => b.at - a.at);
  }

  head(id) {
    const value = this.storage.getItem(PREFIX + id);
    if (value === null) return null;
    try {
      const { title, at, revision, model, system } = JSON.parse(value.slice(0, value.indexOf("\n")));
      if (typeof title !== "string" || !Number.isFinite(at) || !Number.isInteger(revision)) return null;
      return { id, title, at, revision, model: String(model ?? ""), system: String(system ?? ""), size: value.length };
    } catch {
      return null;
    }
  }

  // A chat with its messages; null if there is none that can be read.
  read(id) {
    const head = this.head(id);
    if (!head) return null;
    try {
      const value = this.storage.getItem(PREFIX + id), all = JSON.parse(value.slice(value.indexOf("\n") + 1));
      const messages = all.filter((one) => ["user", "assistant"].includes(one?.role) && typeof one.content === "string").map(kept);
      return { id, revision: head.revision, model: head.model, system: head.system, messages };
    } catch {
      return null;
    }
  }

  // Keeps a chat. If another tab has changed it meanwhile, this one goes on as a chat of its own; if another tab has
  // forgotten it, so it stays.
  write(chat) {
    const there = chat.id && this.head(chat.id);
    if (chat.id && !there) return FORGOTTEN;
    if (!chat.id || there.revision !== chat.revision) {
      chat.id = crypto.randomUUID?.() ?? `${this.now()}-${Math.random().toString(36).slice(2)}`; // of pages over https and on this machine
      chat.revision = 0;
    }
    chat.revision++;
    const { id, revision, model, system, messages } = chat;
    const head = { title: titled(messages), at: this.now(), revision, model, system };
    const outcome = this.put(id, `${JSON.stringify(head)}\n${JSON.stringify(messages.map(kept))}`);
    if (outcome === FULL) Object.assign(chat, { id: null, revision: 0 });
    return outcome;
  }

  put(id, value) {
    const others = this.list().filter((one) => one.id !== id);
    let size = others.reduce((sum, one) => sum + one.size, value.length);
    while (others.length && (others.length >= MOST || size > ROOM)) size -= this.drop(others);
    for (;;) {
      try {
        this.storage.setItem(PREFIX + id, value);
        return SAVED;
      } catch { // the browser's room is used up
        if (!others.length) return FULL;
        this.drop(others);
      }
    }
  }

  drop(others) {
    const oldest = others.pop();
    this.forget(oldest.id);
    return oldest.size;
  }

  forget(id) {
    this.storage.removeItem(PREFIX + id);
  }

  forgetAll() {
    for (const key of this.keys()) this.storage.removeItem(key);
  }

  // Moves all chats to another storage.
  move(storage) {
    const from = this.storage, values = this.keys().map((key) => [key, from.getItem(key)]);
    this.forgetAll();
    this.storage = storage;
    for (const [key, value] of values) this.put(key.slice(PREFIX.length), value);
  }

  idOf(key) {
    return key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
  }
}
