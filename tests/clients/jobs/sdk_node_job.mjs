// OpenAI's and Anthropic's clients for Node, with their helpers for streams, types and tools.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { checkPerson, MODEL, PERSON_PROMPT, PROMPT, readFile, run, URL } from "./job.mjs";

const api = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const claude = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const Path = z.object({ path: z.string() });
const Person = z.object({ name: z.string(), age: z.number().int() });
const messages = [{ role: "user", content: PROMPT }];
const tools = [zodFunction({ name: "read_file", description: "Read a file", parameters: Path, function: readFile })];
const claudeTools = [betaZodTool({ name: "read_file", description: "Read a file", inputSchema: Path, run: readFile })];

run({
  chatRunTools: () => api.chat.completions.runTools({ model: MODEL, messages, tools }).finalContent(),
  chatRunToolsStreamed: () => api.chat.completions.runTools({ model: MODEL, messages, tools, stream: true }).finalContent(),
  chatParsed: async () => {
    const answer = await api.chat.completions.parse({
      model: MODEL, messages: [{ role: "user", content: PERSON_PROMPT }], response_format: zodResponseFormat(Person, "person"),
    });
    checkPerson(answer.choices[0].message.parsed);
  },
  responsesStreamed: async () => {
    const input = [...messages];
    const parameters = { ...z.toJSONSchema(Path), additionalProperties: false };
    for (;;) {
      const stream = api.responses.stream({
        model: MODEL, input, tools: [{ type: "function", name: "read_file", parameters, strict: true }],
      });
      const response = await stream.finalResponse();
      const calls = response.output.filter((item) => item.type === "function_call");
      if (!calls.length) return response.output_text;
      input.push(...response.output);
      for (const call of calls)
        input.push({ type: "function_call_output", call_id: call.call_id, output: readFile(JSON.parse(call.arguments)) });
    }
  },
  messagesToolRunner: async () => {
    const runner = claude.beta.messages.toolRunner({ model: MODEL, max_tokens: 200, messages, tools: claudeTools });
    return (await runner).content.at(-1).text;
  },
  messagesToolRunnerStreamed: async () => {
    let message;
    const asked = { model: MODEL, max_tokens: 200, messages, tools: claudeTools, stream: true };
    for await (const stream of claude.beta.messages.toolRunner(asked)) message = await stream.finalMessage();
    return message.content.at(-1).text;
  },
});
