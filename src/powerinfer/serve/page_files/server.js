// Requests to the server, and the events of its answers.
import { ofTab } from "./storage.js";

const KEY = "powerinfer.key";
const SILENT = 45000; // ms without a byte, after which a stream counts as lost: the server sends a comment every 10 s

export class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Lost extends Error {
  constructor() {
    super("the connection to the server was lost");
  }
}

export const useKey = (key) => ofTab.setItem(KEY, key);

// Refused: what the server says; Lost: it does not answer; an AbortError by the signal.
export async function ask(path, options = {}) {
  const key = ofTab.getItem(KEY);
  const headers = { ...(options.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Lost();
  }
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Refused(told?.error?.message ?? `the server answered with status ${answer.status}`, answer.status, told?.error?.code);
  }
  return answer;
}

// The documents of a stream. Lost if it ends before its last event.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "", timer = 0;
  const silence = () => new Promise((_, fail) => { timer = setTimeout(() => fail(new Lost()), SILENT); });
  try {
    for (;;) {
      const { done, value } = await Promise.race([reader.read(), silence()]);
      clearTimeout(timer);
      if (done) throw new Lost();
      const parts = (left + value).split("\n\n");
      left = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
      }
    }
  } catch (error) {
    throw ["AbortError", "Refused"].includes(error.name) || error instanceof Refused ? error : new Lost();
  } finally {
    clearTimeout(timer);
    reader.cancel().catch(() => {});
  }
}
