// The browser's storage; where site data is blocked, which forbids even to look at it, one until the page is left.

// The same methods as a browser's storage.
export class Memory {
  constructor() { this.values = new Map(); }
  get length() { return this.values.size; }
  key(at) { return [...this.values.keys()][at] ?? null; }
  getItem(key) { return this.values.get(key) ?? null; }
  setItem(key, value) { this.values.set(key, value); }
  removeItem(key) { this.values.delete(key); }
}

// name: localStorage or sessionStorage; null: it cannot be used.
function browserStorage(name) {
  try {
    const storage = globalThis[name];
    storage.setItem("powerinfer.probe", "1");
    storage.removeItem("powerinfer.probe");
    return storage;
  } catch {
    return null;
  }
}

export const lasting = browserStorage("localStorage");
export const ofTab = browserStorage("sessionStorage") ?? new Memory();
