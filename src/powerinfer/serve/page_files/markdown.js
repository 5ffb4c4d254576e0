// Simple Markdown as DOM nodes: code blocks, inline code, bold, headings as bold, lists. Text is only ever a text node.
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

function inline(parent, text) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(at, match.index));
    const node = document.createElement(match[1] === undefined ? "strong" : "code");
    node.textContent = match[1] ?? match[2];
    parent.append(node);
    at = match.index + match[0].length;
  }
  parent.append(text.slice(at));
}

function add(parent, name) {
  const node = document.createElement(name);
  parent.append(node);
  return node;
}

function lines(parent, text) {
  let list = null, paragraph = null;
  for (const line of text.split("\n")) {
    const item = /^\s{0,6}([-*+]|\d{1,9}[.)])\s+(.*)$/.exec(line), title = /^#{1,6}\s+(.*)$/.exec(line);
    if (item) {
      const kind = /\d/.test(item[1]) ? "OL" : "UL";
      if (list?.tagName !== kind) {
        list = add(parent, kind);
        if (kind === "OL") list.start = parseInt(item[1], 10);
      }
      inline(add(list, "li"), item[2]);
      paragraph = null;
    } else if (title) {
      inline(add(add(parent, "p"), "strong"), title[1]);
      list = paragraph = null;
    } else if (!line.trim()) {
      list = paragraph = null;
    } else {
      if (paragraph) paragraph.append("\n");
      else paragraph = add(parent, "p");
      inline(paragraph, line);
      list = null;
    }
  }
}

export function render(text) {
  const whole = document.createDocumentFragment();
  let code = null, block = [];
  const flush = () => {
    if (code) code.textContent = block.join("\n");
    else lines(whole, block.join("\n"));
    block = [];
  };
  for (const line of text.split("\n")) {
    if (!/^\s{0,3}```/.test(line)) { block.push(line); continue; }
    flush();
    code = code ? null : add(add(whole, "pre"), "code");
  }
  flush();
  return whole;
}
