// Markdown as DOM nodes: code, headings, lists, tables, quotes, links. Text is only ever a text node, so that nothing a
// model writes becomes HTML. Time is linear in the text: searches that fail are remembered, and nesting is bounded.
const DEPTH = 8;        // of lists and quotes in each other
const NEAR = 2000;      // characters between a mark and the one that closes it
const COLUMNS = 64, SCHEMES = ["http:", "https:", "mailto:"];

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/, HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/, QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|[ \t]*)$/, DASHES = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;

// ---- Blocks

const indent = (line) => /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;

function cells(line) {
  const whole = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return whole.split(/(?<!\\)\|/).slice(0, COLUMNS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isTable(lines, at) {
  const dashes = lines[at + 1]?.trim();
  return dashes !== undefined && dashes.length < NEAR && lines[at].includes("|") && DASHES.test(dashes) && cells(dashes).length === cells(lines[at]).length;
}

function begins(lines, at) {
  const line = lines[at], item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, at)
    || (item !== null && item[3] !== undefined && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1));
}

function fenced(lines, at, mark) {
  const text = [], room = indent(lines[at]), ends = new RegExp(`^ {0,3}${mark[1][0]}{${mark[1].length},}[ \\t]*$`);
  let end = at + 1;
  for (; end < lines.length && !ends.test(lines[end]); end++) text.push(lines[end].slice(Math.min(room, indent(lines[end]))));
  const language = mark[2].trim().split(/[\s{]/)[0].slice(0, 32);
  return [{ type: "code", language, text: text.join("\n") }, Math.min(end + 1, lines.length)];
}

function table(lines, at) {
  const align = cells(lines[at + 1]).map((dash) => (/^:.*:$/.test(dash) ? "center" : dash.endsWith(":") ? "right" : ""));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end++) rows.push(cells(lines[end]));
  return [{ type: "table", align, head: cells(lines[at]), rows }, end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]), ordered = /\d/.test(first[2]), base = indent(lines[at]);
  const kind = (mark) => (ordered ? /\d/.test(mark) : mark === first[2]);
  const items = [];
  let end = at, part = null, blank = false, room = 0;
  for (; end < lines.length; end++) {
    const line = lines[end], item = ITEM.exec(line), deep = indent(line);
    if (!line.trim()) {
      blank = true;
      part?.push("");
      continue;
    }
    if (item && deep < base + 2 && deep < Math.max(room, base + 1) && !RULE.test(line)) {
      if (!kind(item[2])) break;
      room = deep + item[2].length + 1;
      items.push((part = [item[3] ?? ""]));
    } else if (deep >= Math.min(room, base + 2)) {
      part.push(line.slice(Math.min(line.length - line.trimStart().length, room)));
    } else if (!blank && !begins(lines, end)) {
      part.push(line.trimStart()); // a paragraph goes on
    } else break;
    blank = false;
  }
  const made = items.map((some) => {
    const task = /^\[([ xX])\] +(.*)$/.exec(some[0]);
    if (task) some[0] = task[2];
    return { done: task ? task[1] !== " " : null, blocks: blocksOf(some, depth + 1) };
  });
  return [{ type: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items: made }, end];
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end++) {
    const mark = QUOTE.exec(lines[end]);
    if (mark) inner.push(mark[1]);
    else if (lines[end].trim() && inner.at(-1)?.trim() && !begins(lines, end)) inner.push(lines[end]);
    else break;
  }
  return [{ type: "quote", blocks: blocksOf(inner, depth + 1) }, end];
}

// A heading without the marks that may close it.
function title(text) {
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

function block(lines, at, depth) {
  const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
  if (fence) return fenced(lines, at, fence);
  if (heading) return [{ type: "heading", level: heading[1].length, text: title((heading[2] ?? "").trim()) }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (isTable(lines, at)) return table(lines, at);
  if (depth < DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEPTH && ITEM.test(line)) return list(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end++;
  return [{ type: "paragraph", text: lines.slice(at, end).map((part) => part.trimStart()).join("\n") }, end];
}

// Blocks of lines; each has the text that it was made of.
function blocksOf(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) { at++; continue; }
    const [made, end] = block(lines, at, depth);
    found.push({ ...made, source: depth ? "" : lines.slice(at, end).join("\n") });
    at = end;
  }
  return found;
}

export const parse = (text) => blocksOf(text.replaceAll("\r\n", "\n").split("\n"));

// ---- Inside a paragraph

const SPECIAL = /[`*_~[!\\<\n]|https?:\/\//g;

export function inline(text, links = true, depth = 0) {
  const out = [], next = new Map();
  let plain = "", at = 0;
  const find = (what, from) => { // the next place, remembered: text without closing marks is searched once
    const known = next.get(what);
    if (known !== undefined && (known === -1 || known >= from)) return known;
    const place = text.indexOf(what, from);
    next.set(what, place);
    return place;
  };
  const put = (node, end) => {
    if (plain) out.push(plain);
    plain = "";
    out.push(node);
    at = end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const hit = SPECIAL.exec(text);
    plain += text.slice(at, hit ? hit.index : text.length);
    if (!hit) break;
    at = hit.index;
    const sign = hit[0];
    const made = sign === "`" ? code(text, at, find)
      : sign === "\\" ? escaped(text, at)
      : sign === "\n" ? [{ type: "break" }, at + 1]
      : sign === "<" ? lineBreak(text, at)
      : sign === "[" || sign === "!" ? links && link(text, at, find, depth)
      : sign.length > 1 ? links && address(text, at)
      : depth < DEPTH && emphasis(text, at, find, links, depth);
    if (made) {
      if (typeof made[0] === "string") { plain += made[0]; at = made[1]; } else put(...made);
    } else {
      const run = sign.length > 1 ? sign.length : /^(.)\1*/s.exec(text.slice(at, at + 64))[0].length;
      plain += text.slice(at, at + (sign === "[" || sign === "!" || sign === "<" ? 1 : run));
      at += sign === "[" || sign === "!" || sign === "<" ? 1 : run;
    }
  }
  if (plain) out.push(plain);
  return out;
}

function code(text, at, find) {
  const run = /^`+/.exec(text.slice(at, at + 64))[0];
  let end = find(run, at + run.length);
  for (let tries = 0; end !== -1 && tries < 16; tries++) {
    const close = /^`+/.exec(text.slice(end, end + 64))[0];
    if (close.length === run.length) {
      const inner = text.slice(at + run.length, end).replaceAll("\n", " ");
      return [{ type: "code", text: inner.trim() && inner.startsWith(" ") && inner.endsWith(" ") ? inner.slice(1, -1) : inner }, end + run.length];
    }
    end = text.indexOf(run, end + close.length);
  }
  return null;
}

const escaped = (text, at) => (/[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null);

function lineBreak(text, at) {
  const mark = /^<br ?\/?>/i.exec(text.slice(at, at + 6));
  return mark && [{ type: "break" }, at + mark[0].length];
}

function safe(target) {
  try {
    const url = new URL(target);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(text, at, find, depth) {
  const start = text[at] === "!" ? at + 1 : at; // an image is a link to it: the page loads nothing from elsewhere
  if (text[start] !== "[") return null;
  const close = find("](", start + 1);
  if (close === -1 || close - start > NEAR) return null;
  let end = close + 2;
  for (let open = 1; end < text.length && end - close < NEAR; end++) { // addresses may have brackets in pairs
    if (text[end] === "(") open++;
    else if (text[end] === ")" && --open === 0) break;
    else if (text[end] === "\n") return null;
  }
  if (text[end] !== ")") return null;
  const href = safe(text.slice(close + 2, end).trim().replace(/[ \t]["'(].*$/, "").trim().replace(/^<(.*)>$/, "$1"));
  if (!href) return null;
  const label = inline(text.slice(start + 1, close), false, depth + 1);
  return [{ type: "link", href, inner: label.length ? label : [href] }, end + 1];
}

function address(text, at) {
  const [found] = /^[^\s<>"'`|]{1,2000}/.exec(text.slice(at, at + NEAR)), end = [...found].findLastIndex((sign) => !".,:;!?*_)]".includes(sign));
  const bare = [...found].slice(0, end + 1).join("");
  const whole = bare.includes("(") && found[bare.length] === ")" ? `${bare})` : bare, href = safe(whole);
  return href && [{ type: "link", href, inner: [whole] }, at + whole.length];
}

const MARKS = { "***": "both", "**": "strong", "*": "em", "___": "both", "__": "strong", "_": "em", "~~": "del" };
const WORD = /[\p{L}\p{N}]/u;

function emphasis(text, at, find, links, depth) {
  const mark = /^(?:\*{1,3}(?!\*)|_{1,3}(?!_)|~~(?!~))/.exec(text.slice(at, at + 4))?.[0];
  const from = at + (mark?.length ?? 0);
  if (!mark || /\s/.test(text[from] ?? " ") || (mark[0] === "_" && WORD.test(text[at - 1] ?? ""))) return null;
  let end = find(mark, from);
  for (let tries = 0; end !== -1 && end - at < NEAR && tries < 16; tries++) {
    const run = new RegExp(`^[${mark[0]}]+`).exec(text.slice(end, end + 64))[0].length;
    // "**a *b***": what is left of a longer run closes another mark
    const fits = run === mark.length || (run > mark.length && run !== 2 && mark.length < 3);
    const place = run > mark.length ? end + run - mark.length : end;
    if (fits && !/\s/.test(text[end - 1]) && !(mark[0] === "_" && WORD.test(text[end + run] ?? ""))) {
      return [{ type: MARKS[mark], inner: inline(text.slice(from, place), links, depth + 1) }, place + mark.length];
    }
    end = text.indexOf(mark, end + run);
  }
  return null;
}

// ---- Nodes

function node(name, inner = []) {
  const made = document.createElement(name);
  for (const one of inner) made.append(one); // one by one: there may be more than a call takes
  return made;
}

function inlineNodes(parts) {
  return (typeof parts === "string" ? inline(parts) : parts).map((part) => {
    if (typeof part === "string") return part;
    if (part.type === "break") return node("br");
    if (part.type === "code") return node("code", [part.text]);
    if (part.type === "both") return node("strong", [node("em", inlineNodes(part.inner))]);
    if (part.type !== "link") return node(part.type, inlineNodes(part.inner));
    const link = node("a", inlineNodes(part.inner));
    link.setAttribute("href", part.href);
    link.setAttribute("title", part.href);
    link.setAttribute("target", "_blank");
    link.setAttribute("rel", "noopener noreferrer nofollow");
    return link;
  });
}

function codeNode(block, copy) {
  const bar = node("div", [node("span", [block.language || "text"]), copy(block.text)]), whole = node("div", [bar]);
  whole.setAttribute("class", "code");
  bar.setAttribute("class", "code-bar");
  const pre = node("pre", [node("code", [block.text])]);
  pre.setAttribute("tabindex", "0"); // a wide block is scrolled with the keyboard
  whole.append(pre);
  return whole;
}

function tableNode({ head, align, rows }) {
  const row = (name, values) => node("tr", head.map((_, at) => {
    const cell = node(name, inlineNodes(values[at] ?? ""));
    if (align[at]) cell.setAttribute("class", align[at]);
    return cell;
  }));
  const whole = node("div", [node("table", [node("thead", [row("th", head)]), node("tbody", rows.map((one) => row("td", one)))])]);
  whole.setAttribute("class", "scroll");
  whole.setAttribute("tabindex", "0");
  return whole;
}

function listNode({ ordered, start, items }, copy) {
  const whole = node(ordered ? "ol" : "ul");
  if (ordered && start !== 1) whole.setAttribute("start", start);
  for (const { done, blocks } of items) {
    const item = node("li");
    if (done !== null) item.setAttribute("class", "task");
    if (done !== null) item.append(done ? "\u2611 " : "\u2610 ");
    for (const [at, one] of blocks.entries()) {
      if (one.type === "paragraph" && at === 0) for (const part of inlineNodes(one.text)) item.append(part);
      else item.append(blockNode(one, copy));
    }
    whole.append(item);
  }
  return whole;
}

function blockNode(block, copy) {
  if (block.type === "code") return codeNode(block, copy);
  if (block.type === "heading") return node(`h${Math.min(6, block.level + 2)}`, inlineNodes(block.text)); // below the page's
  if (block.type === "rule") return node("hr");
  if (block.type === "table") return tableNode(block);
  if (block.type === "quote") return node("blockquote", block.blocks.map((one) => blockNode(one, copy)));
  if (block.type === "list") return listNode(block, copy);
  return node("p", inlineNodes(block.text));
}

// Fills an element with text that grows. Blocks that stay the same keep their nodes, so that a selection survives.
// copy: makes the button that copies a block of code.
export class Rendered {
  constructor(parent, copy) {
    this.parent = parent;
    this.copy = copy;
    this.text = null;
    this.shown = []; // [source, node]
  }

  set(text) {
    if (text === this.text) return;
    this.text = text;
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && this.shown[same]?.[0] === blocks[same].source) same++;
    for (const [, old] of this.shown.splice(same)) old.remove();
    for (const one of blocks.slice(same)) {
      const made = blockNode(one, this.copy);
      this.shown.push([one.source, made]);
      this.parent.append(made);
    }
  }
}
