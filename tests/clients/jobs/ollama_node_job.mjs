// Ollama's client for Node: chats with functions and thoughts, texts, formats, embeddings, models, errors.
import { Ollama } from "ollama";
import { checkPerson, MODEL, PERSON_PROMPT, PROMPT, readFile, run, URL } from "./job.mjs";

const api = new Ollama({ host: URL });
const model = MODEL;
const text = { type: "string" };
const path = { type: "object", properties: { path: text }, required: ["path"] };
const tools = [{ type: "function", function: { name: "read_file", description: "Read a file", parameters: path } }];
const person = { type: "object", properties: { name: text, age: { type: "integer" } }, required: ["name", "age"] };

// Calls functions until `ask` answers without a call.
async function converse(ask) {
  const messages = [{ role: "user", content: PROMPT }];
  for (;;) {
    const message = await ask(messages);
    if (!message.thinking) throw new Error("there is no thought");
    if (!message.tool_calls?.length) return message.content;
    messages.push(message);
    for (const { function: { name, arguments: given } } of message.tool_calls)
      messages.push({ role: "tool", tool_name: name, content: readFile(given) });
  }
}

async function refused(ask, status, says) {
  const error = await ask().then(() => undefined, (thrown) => thrown);
  if (error?.status_code !== status || !error.message.includes(says)) throw new Error(`it is ${error}`);
}

run({
  chat: () => converse(async (messages) => (await api.chat({ model, messages, tools, think: true })).message),
  chatStreamed: () =>
    converse(async (messages) => {
      const message = { role: "assistant", content: "", thinking: "", tool_calls: [] };
      for await (const part of await api.chat({ model, messages, tools, stream: true, options: { temperature: 0 } })) {
        message.content += part.message.content;
        message.thinking += part.message.thinking ?? "";
        message.tool_calls.push(...(part.message.tool_calls ?? []));
      }
      return message;
    }),
  chatParsed: async () => {
    const messages = [{ role: "user", content: PERSON_PROMPT }];
    checkPerson(JSON.parse((await api.chat({ model, messages, format: person })).message.content));
  },
  generate: async () => {
    const asked = { model, prompt: PERSON_PROMPT, system: "Be brief.", format: "json" };
    checkPerson(JSON.parse((await api.generate(asked)).response));
    let written = "";
    for await (const part of await api.generate({ ...asked, stream: true })) written += part.response;
    checkPerson(JSON.parse(written));
  },
  embed: async () => {
    const { embeddings } = await api.embed({ model, input: ["one", "two"] });
    const { embedding } = await api.embeddings({ model, prompt: "one" });
    if (embeddings.length !== 2 || String(embedding) !== String(embeddings[0])) throw new Error("they differ");
  },
  models: async () => {
    const [listed] = (await api.list()).models;
    const [loaded] = (await api.ps()).models;
    const shown = await api.show({ model: listed.name });
    if (listed.name !== `${MODEL}:latest` || loaded.digest !== listed.digest) throw new Error(JSON.stringify(listed));
    if (!shown.capabilities.includes("tools") || !(await api.version()).version) throw new Error(JSON.stringify(shown));
  },
  errors: async () => {
    const messages = [{ role: "user", content: "x" }];
    await refused(() => api.chat({ model: "nothing", messages }), 404, "not found");
    await refused(() => api.generate({ model: "nothing", prompt: "x", stream: true }), 404, "not found");
    await refused(() => api.chat({ model, messages: [{ ...messages[0], images: ["aGk="] }] }), 400, "takes text");
    await refused(() => api.pull({ model: "nothing" }), 501, "powerinfer pull");
    await refused(() => api.delete({ model: "nothing" }), 501, "powerinfer rm");
  },
});
