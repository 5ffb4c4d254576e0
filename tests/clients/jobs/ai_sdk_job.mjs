// The AI SDK of Vercel, with its providers for compatible servers, for OpenAI's chats and for OpenAI's responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { checkPerson, MODEL, PERSON_PROMPT, PROMPT, readFile, run, URL } from "./job.mjs";

const compatible = createOpenAICompatible({ name: "powerinfer", baseURL: `${URL}/v1`, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const models = { compatible: compatible(MODEL), chat: openai.chat(MODEL), responses: openai.responses(MODEL) };
const tools = {
  read_file: tool({ description: "Read a file", inputSchema: z.object({ path: z.string() }), execute: readFile }),
};
const Person = z.object({ name: z.string(), age: z.number().int() });

const jobs = {};
for (const [name, model] of Object.entries(models)) {
  const asked = { model, prompt: PROMPT, tools, stopWhen: (isStepCount ?? stepCountIs)(4), maxRetries: 0 };
  jobs[name] = async () => (await generateText(asked)).text;
  jobs[`${name}Streamed`] = async () => {
    const stream = streamText({ ...asked, onError: ({ error }) => console.error(error) });
    return await stream.text;
  };
  jobs[`${name}Parsed`] = async () => {
    const output = Output.object({ schema: Person });
    checkPerson((await generateText({ model, prompt: PERSON_PROMPT, output, maxRetries: 0 })).output);
  };
}
run(jobs);
