// The prompts of the JavaScript clients' jobs, and how these run: `node JOB.mjs URL`; stand_in.py reads the scripts.
import { randomBytes } from "node:crypto";

export const URL = process.argv[2];
export const MODEL = "stand-in";
const WORD = `word${randomBytes(4).toString("hex")}`;
export const PROMPT =
  'Read notes.txt. SCRIPT [{"think": "I need it.", "call": "read_file", "arguments": {"path": "notes.txt"}}, ' +
  '{"think": "That is it.", "say": "It says WORD, yes."}]';
export const PERSON_PROMPT = 'Who? SCRIPT [{"say": "{\\"name\\": \\"Jo\\", \\"age\\": 3}"}]';
const ANSWER = `It says ${WORD}, yes.`;

export function readFile({ path }) {
  if (path !== "notes.txt") throw new Error(`no file ${path}`);
  return `code word: ${WORD}`;
}

export function checkPerson(person) {
  if (person?.name !== "Jo" || person?.age !== 3) throw new Error(`the person is ${JSON.stringify(person)}`);
}

// Does all jobs, each of which returns the model's answer after the result, or undefined where it checks by itself.
export async function run(jobs) {
  for (const [name, job] of Object.entries(jobs)) {
    try {
      const answer = await job();
      if (answer !== undefined && answer !== ANSWER)
        throw new Error(`the answer is ${JSON.stringify(answer)}, not ${JSON.stringify(ANSWER)}`);
      console.log(`ok      ${name}`);
    } catch (error) {
      process.exitCode = 1;
      console.log(`FAILED  ${name}`);
      console.error(error);
    }
  }
}
